"""Inference role: unmodified vLLM, a small router below `/rlrun/*` (`http`), and access control for every route (`guard`).

`engine_server` runs vLLM in this process and is the only module that imports it. `weights` replaces the
weights, `client` is the orchestrator's client.
"""
