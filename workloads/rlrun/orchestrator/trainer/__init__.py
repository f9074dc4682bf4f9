"""Orchestrator's side of the channel to the trainer."""
