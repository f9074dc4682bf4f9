"""One environment in a process of its own, so that whatever its code does costs only its own rollouts.

`isolated.IsolatedEnvironment` is what the orchestrator holds: it starts the process again when it ends. `life` is one
life of that process, `worker` is its inside, `wire` what the two tell each other, `kill` how nothing of it is left.
"""
