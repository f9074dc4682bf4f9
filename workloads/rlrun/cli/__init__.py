"""Command lines: `rlrun` (`main`, with related subcommands in one module), `rl`, `sft`, `eval`, and roles (`role_commands`).

The modules only read arguments, call the package, print the result and return an exit code.
"""
