"""The real operator, executed one request at a time."""
