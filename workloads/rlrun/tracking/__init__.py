"""Trackers: separate processes read the run's folder and send it to trackers, so training never waits for a tracker.

`record_source` reads the roles' files (`metrics.jsonl`, `traces/`), `tracker_records` translates names, `worker` sends new records
to one tracker of `backends`, and `sink` restarts the workers.
"""
