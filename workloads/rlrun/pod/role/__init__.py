"""Process of the role: its command, its output, its end and the message that explains it."""
