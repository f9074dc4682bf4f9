"""The command lines: `rlrun` (`main`, one module per subcommand), `rl`, and one entry point per role (`roles`).

Edges only: they read arguments, call the package, print, and return an exit code.
"""
