"""Readers of other trainers' files: shell scripts, Hydra's YAML and overrides. They return settings by dotted key and execute nothing."""
