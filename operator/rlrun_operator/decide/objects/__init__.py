"""Objects of a run: its claim, its API key, its volume, roles that have not started, and repairs of a running attempt. Pure."""
