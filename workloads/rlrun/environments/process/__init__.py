"""One environment in a process of its own, so that whatever its code does costs only its own rollouts.

`isolated` is the orchestrator's handle, `life` one start of the process, `worker` its inside, `wire` the messages between them.
"""
