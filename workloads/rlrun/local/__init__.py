"""`rlrun local`: all roles of a run on this machine, from the manifest that the operator takes.

`plan` (pure) says which processes, `preflight` what would go wrong, `supervisor` starts, watches and ends them, `view` shows the run.
"""
