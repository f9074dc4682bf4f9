"""Reports of the orchestrator: the progress Lease, its HTTP server, and metrics per step."""
