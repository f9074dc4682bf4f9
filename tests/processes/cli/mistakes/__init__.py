"""Mistakes at the command line: their table, their outcomes and the rule that judges each message."""
