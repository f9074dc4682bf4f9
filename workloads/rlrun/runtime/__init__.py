"""Parts of every role's process: exit codes, logs, HTTP server, start of other processes, protection from them."""
