"""Type names for JSON documents whose fields are read without a model: Kubernetes objects and JSON schemas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Json = dict[str, Any]
"""A JSON object that may be changed."""
Manifest = Mapping[str, Any]
"""A Kubernetes object as JSON, or a part of one; read-only."""
