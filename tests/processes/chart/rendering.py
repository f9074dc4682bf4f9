"""What the tests of the chart share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

CHART = Path(__file__).parents[3] / "charts" / "rlrun-operator"
KUBE_VERSION = "1.34.0"
"""Of the cluster that the chart is rendered for."""

Render = Callable[..., list[dict[str, Any]]]


class RefusedError(Exception):
    """Helm refused the values; its message."""
