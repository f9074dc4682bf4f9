"""`rlrun local`: run all roles on this machine, with the same manifest as in a cluster.

`process_plan` (pure) computes the processes, `preflight` checks for problems before the start, `supervisor` starts, watches and ends the
processes, and `view` shows the run.
"""
