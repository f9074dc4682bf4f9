"""Shared parts of the chart tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

CHART = Path(__file__).parents[3] / "charts" / "rlrun-operator"
KUBE_VERSION = "1.34.0"
"""Version of the cluster for which the chart is rendered."""

Render = Callable[..., list[dict[str, Any]]]


class RefusedError(Exception):
    """Helm refused the values; contains its message."""
