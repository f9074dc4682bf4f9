"""Readers of other trainers' files: shell scripts, Hydra's YAML and overrides. Each returns settings by dotted key; nothing is run."""
