"""The number of a run's engines: what autoscaling wants, and how an engine goes without losing a rollout."""
