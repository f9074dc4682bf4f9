"""The Kubernetes operator: watches `RLRun` objects and their children, decides, applies, reports."""
