"""Objects of a run: its growing claim, its API key, its volume, the repair of small ones, and corrections of a running attempt. Pure."""
