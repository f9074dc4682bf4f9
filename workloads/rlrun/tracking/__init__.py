"""Trackers: each is fed from the run's folder by a process of its own, which training never waits for.

`source` reads what the roles have written (`metrics.jsonl`, `traces/`), `names` translates, `worker` sends from a mark on the volume to one
tracker of `backends`, and `sink` keeps the workers alive.
"""
