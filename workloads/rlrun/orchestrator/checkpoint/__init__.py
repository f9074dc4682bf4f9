"""The orchestrator's part of a checkpoint: its content, and the writer that agrees with the trainer on a step."""
