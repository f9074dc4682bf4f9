"""Soak test: many short runs of the trainer, in search of rare failures."""
