"""The inference role: stock vLLM with a thin router under `/rlrun/*` (`http`) and a guard in front of every route.

`server` runs vLLM in this process and alone imports it, `weights` changes its weights, `client` is the orchestrator's side.
"""
