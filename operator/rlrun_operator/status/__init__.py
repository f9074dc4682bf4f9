"""Conditions, reasons and events of a run's status, its progress, and the causes that keep its pods from starting. Pure functions."""
