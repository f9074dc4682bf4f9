"""A bundle for a bug report: what goes in, and what is removed from it."""
