"""The role's process: its command, its output, its end and the message that explains it."""
