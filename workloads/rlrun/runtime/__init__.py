"""A role's process, whatever the role: exit codes, logs, HTTP server, start of other processes, protection from them."""
