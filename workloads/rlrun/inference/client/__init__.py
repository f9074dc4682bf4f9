"""The orchestrator's side of an engine: requests, checked answers, load."""
