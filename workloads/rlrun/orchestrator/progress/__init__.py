"""What the orchestrator reports: the progress Lease, its HTTP server, and metrics per step."""
