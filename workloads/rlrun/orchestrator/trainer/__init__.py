"""The orchestrator's side of the trainer's channel."""
