"""Read-only commands: checks of manifests, environments and this machine. Only `env install` writes files."""
