"""The orchestrator's part of a checkpoint: its content and its writer."""
