"""Machinery of the operator's process: cache, workqueue, leader election, events, metrics, logs and self-checks."""
