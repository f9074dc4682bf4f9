"""Environments written for other interfaces: programs for OpenAI's client, and tasksets of verifiers."""
