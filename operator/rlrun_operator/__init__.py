"""The Kubernetes operator: watches `RLRun` objects and their children, decides, applies, reports.

`main` starts `manager`, which starts the loop in `reconcile`, with the machinery in `runtime` and `kube`. Pure: `decide`, `failures`,
`status`, `render` and `restrictions`. Imports between the rooms point one way, see `[tool.importlinter]` in `pyproject.toml`.
"""
