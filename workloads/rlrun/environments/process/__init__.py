"""One environment in its own process, so that its code can harm only its own rollouts.

`isolated` is the orchestrator's interface, `life` one start of the process, `worker` the code inside the process, and `wire` the messages
between them.
"""
