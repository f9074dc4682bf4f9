"""The real operator, driven one request at a time."""
