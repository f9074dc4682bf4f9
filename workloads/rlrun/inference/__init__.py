"""The inference role: stock vLLM with a thin router under `/rlrun/*` and a guard in front of every route.

`server` runs vLLM in this process, `handover` changes weights, `guard` decides who may call what, `client` is the
orchestrator's side. Only `server` imports vLLM.
"""
