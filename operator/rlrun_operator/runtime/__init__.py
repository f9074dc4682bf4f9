"""Machinery of the operator's process: cache, workqueue, leader election, events, metrics, logs and checks of itself."""
