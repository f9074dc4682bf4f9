"""Trackio: its database in `tracking/trackio` of the run's folder, or a Space on the hub."""

from __future__ import annotations

DEFAULT_PROJECT = "rlrun"


class TrackioTracker:
    """A run in Trackio."""
