"""Command lines: `rlrun` (`main`, one module per subcommand), `rl`, `sft`, `eval`, and one entry point per role (`roles`).

The modules only read arguments, call the package, print the result and return an exit code.
"""
