"""Names of JSON in types, for documents whose members are read by code that knows them: Kubernetes' objects and JSON schemas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Json = dict[str, Any]
"""A JSON object that is made here, or was read by its owner."""
Manifest = Mapping[str, Any]
"""A Kubernetes object as JSON, or a part of one."""
