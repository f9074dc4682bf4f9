"""The orchestrator's client of an engine: requests, validated responses and load metrics."""
