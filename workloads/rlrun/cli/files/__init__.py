"""Commands that write files: manifests, rows, models, and what ships with the package."""
