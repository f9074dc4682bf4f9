"""Rollouts from the prompt to the result: dispatch, conversations with an engine, tokens, and environments."""
