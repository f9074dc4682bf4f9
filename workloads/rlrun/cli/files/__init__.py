"""Commands that write files: manifests, rows, models, copies, and files of the package."""
