"""Copies of a run's checkpoints, exports and traces in object storage, made by a process beside the run, of what is complete on the volume.

Nothing of the run imports this or waits for it. See `docs/storage.md`.
"""
