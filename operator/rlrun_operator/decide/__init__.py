"""Decisions about one run, from a snapshot of its objects to the changes to make. Pure.

`state_machine.decide` is the entry and `snapshot.Case` its input; `attempt` begins and ends attempts, `running` is for one in between,
`hindsight`, `stall` and `volumes` find what is wrong with it, and `status_builder` writes the status.
"""
