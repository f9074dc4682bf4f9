"""The Kubernetes operator: it watches `RLRun` objects and their children, decides, applies and reports.

`main` starts `manager`, which starts the loop in `reconcile`, with the machinery in `runtime` and `kube`. Pure packages: `decide`,
`failures`, `status`, `render` and `restrictions`. Imports between packages go in one direction: `[tool.importlinter]` in `pyproject.toml`.
"""
