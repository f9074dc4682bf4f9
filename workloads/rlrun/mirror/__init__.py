"""Copies of a run's checkpoints, exports and traces in object storage. A separate process copies complete files from the volume.

The run itself neither imports this package nor waits for it. See `docs/storage.md`.
"""
