"""Decisions about one run, from a snapshot of its objects to the changes to make. Pure.

`state_machine.decide` is the entry and `snapshot.Case` its input, which `reading` begins. `attempt` begins attempts, `running` is for one
in between, `attempt_end` and `restart` are for its end, `completion` and `suspend` for that of the run. `cause`, `hindsight` and `stall`
find what is wrong with it, and `status_builder` writes the status.
"""
