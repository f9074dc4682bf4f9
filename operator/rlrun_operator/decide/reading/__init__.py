"""Parsing of single observed objects: the run with its validated specification and status, and facts of a child. Pure."""
