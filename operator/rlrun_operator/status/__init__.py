"""Parts of a run's status: conditions and their reasons, progress, and why pods do not start. Pure."""
