"""Trackers. Each module imports its library only when the tracker is opened, so a run does not depend on the libraries."""

from __future__ import annotations

from collections.abc import Mapping

from rlrun.config.models.trackers import TrackingConfig
from rlrun.tracking.tracker_records import Tracker


def make_tracker(name: str, config: TrackingConfig, environ: Mapping[str, str]) -> Tracker:
    """Create a configured tracker.

    Raises:
        TrackerError: its package is not installed, or its address is missing.
    """
    if config.wandb is not None and name == "wandb":
        from rlrun.tracking.backends.wandb_run import WandbTracker

        return WandbTracker(config.wandb, environ)
    if config.tensorboard is not None and name == "tensorboard":
        from rlrun.tracking.backends.event_files import TensorBoardTracker

        return TensorBoardTracker()
    if config.mlflow is not None and name == "mlflow":
        from rlrun.tracking.backends.mlflow_rest import MlflowTracker

        return MlflowTracker(config.mlflow, environ)
    if config.trackio is not None and name == "trackio":
        from rlrun.tracking.backends.trackio_run import TrackioTracker

        return TrackioTracker(config.trackio)
    raise AssertionError(f"{name} is not configured")
