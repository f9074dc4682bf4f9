"""Trackers that record a run's metrics: W&B, TensorBoard, MLflow and Trackio."""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from rlrun.config.base import Config
from rlrun.config.formats import ObjectName, PrintableText, WebAddress


class TrackerSecretReference(Config):
    """Reference to a Secret in the run's namespace. Its keys have the names of the tracker's variables."""

    name: ObjectName
    """Name of the Secret."""
    optional: bool = False
    """Start the orchestrator even if the Secret or its keys do not exist."""


class WandbConfig(Config):
    """Weights & Biases. The key is `WANDB_API_KEY`. The library's other variables apply to fields that are not set."""

    project: PrintableText | None = None
    """Project; default: `WANDB_PROJECT`, or rlrun."""
    entity: PrintableText | None = None
    """User or team. Default: `WANDB_ENTITY`, or the owner of the key."""
    name: PrintableText | None = None
    """Name of the tracked run. Default: the run's name."""
    group: PrintableText | None = None
    """Group of runs."""
    tags: Annotated[list[PrintableText], Field(max_length=32)] = Field(default_factory=list)
    """Tags of the run."""
    base_url: WebAddress | None = None
    """Address of a self-hosted server."""
    offline: bool | None = None
    """Write files to the volume for a later `wandb sync`. Default: `WANDB_MODE`, or off."""
    secret_ref: TrackerSecretReference | None = None
    """Secret with `WANDB_API_KEY`, in a cluster. Default: the variable, from `orchestrator.env` or `envFrom`."""

    @property
    def secret_keys(self) -> tuple[str, ...]:
        """Required keys of the Secret. Each becomes the variable of the same name."""
        return ("WANDB_API_KEY",)


class TensorBoardConfig(Config):
    """TensorBoard: event files in `tracking/tensorboard` of the run's folder."""


class MlflowConfig(Config):
    """MLflow, through its REST API. Credentials are `MLFLOW_TRACKING_USERNAME` and `_PASSWORD`, or `MLFLOW_TRACKING_TOKEN`."""

    uri: WebAddress | None = None
    """Address of the tracking server; default: `MLFLOW_TRACKING_URI`."""
    experiment: PrintableText | None = None
    """Experiment; default: `MLFLOW_EXPERIMENT_NAME`, or rlrun."""
    name: PrintableText | None = None
    """Name of the tracked run. Default: the run's name."""
    secret_ref: TrackerSecretReference | None = None
    """Secret with the credentials, in a cluster. Default: the variables, from `orchestrator.env` or `envFrom`."""
    credentials: Literal["Token", "Password"] = "Token"
    """Keys of the Secret: `MLFLOW_TRACKING_TOKEN`, or `MLFLOW_TRACKING_USERNAME` and `MLFLOW_TRACKING_PASSWORD`."""

    @property
    def secret_keys(self) -> tuple[str, ...]:
        """Required keys of the Secret. Each becomes the variable of the same name."""
        if self.credentials == "Token":
            return ("MLFLOW_TRACKING_TOKEN",)
        return ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD")


class TrackioConfig(Config):
    """Trackio: its database in `tracking/trackio` of the run's folder."""

    project: PrintableText | None = None
    """Project; default: rlrun."""
    name: PrintableText | None = None
    """Name of the tracked run. Default: the run's name."""


class TrackedSamplesConfig(Config):
    """Rollouts with text, reward and versions, and histograms of their rewards, advantages and lengths."""

    interval: Annotated[int, Field(ge=1)] = 10
    """Steps between samples."""
    count: Annotated[int, Field(ge=0, le=256)] = 8
    """Rollouts per sample; 0: only the histograms."""


class TrackingConfig(Config):
    """Trackers of the run. A separate process per tracker reads the volume; it cannot delay or stop the run."""

    wandb: WandbConfig | None = None
    """Weights & Biases."""
    tensorboard: TensorBoardConfig | None = None
    """TensorBoard."""
    mlflow: MlflowConfig | None = None
    """MLflow."""
    trackio: TrackioConfig | None = None
    """Trackio."""
    samples: TrackedSamplesConfig = TrackedSamplesConfig()
    """Samples and histograms."""

    @property
    def trackers(self) -> list[str]:
        """Names of the trackers that are set."""
        return [name for name in TRACKERS if getattr(self, name) is not None]

    @property
    def secrets(self) -> list[TrackerSecret]:
        """Secrets that the trackers refer to."""
        return [
            TrackerSecret(f"tracking.{name}.secretRef", block.secret_ref, block.secret_keys)
            for name, block in (("wandb", self.wandb), ("mlflow", self.mlflow))
            if block is not None and block.secret_ref is not None
        ]


class TrackerSecret(NamedTuple):
    """Secret of a tracker."""

    field: str
    """Field of the specification that refers to the Secret."""
    reference: TrackerSecretReference
    """Reference to the Secret."""
    keys: tuple[str, ...]
    """Required keys, which become the tracker's variables."""


TRACKERS = ("wandb", "tensorboard", "mlflow", "trackio")
"""Names of the trackers, as fields of `tracking`."""
