"""Decisions about one run, from a snapshot of its objects to the changes to make. Pure.

`state_machine.decide` is the entry point; it builds a `snapshot.RunSnapshot` on top of `reading`. `attempt` starts attempts,
`running` follows them, `attempt_end` and `restart` end them; `completion` and `suspend` end the run. `stall` finds stalled
runs, `repairs` and `workload_edits` undo changes by others, and `status_builder` writes the status.
"""
