"""Mistakes at the command line: a table of them, what each run of one did, and the rule that judges it."""
