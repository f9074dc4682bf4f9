"""Fingerprint of the part of the run's configuration file that a pod reads.

A pod's template contains the fingerprint, so that no pod uses the file of another attempt by mistake.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

VARIABLE = "RLRUN_CONFIG_MARK"
NOT_READ_BY_ENGINES = frozenset({"replicas", "max_steps"})
"""Fields of an engine's section that engines do not use. They may change while engines run."""


def file_mark(document: Mapping[str, object], role: str) -> str:
    """Return a fingerprint (16 hex digits) of the part of the file that a pod of `role` uses.

    Engines outlive attempts, so the fingerprint of `inference` covers only the engines' section. The number of engines may change
    while an attempt runs and is not part of any fingerprint: the orchestrator finds the engines by their Service.

    Args:
        document: the parsed configuration file.
        role: role of the pod.

    Raises:
        ValueError: The engines' section is not a mapping.
    """
    section = document.get("inference") or {}
    if not isinstance(section, Mapping):
        raise ValueError(f"inference is {type(section).__name__}, not a mapping")
    if role == "inference":
        read = {name: value for name, value in section.items() if name not in NOT_READ_BY_ENGINES}
    else:
        read = {**document, "inference": {name: value for name, value in section.items() if name != "replicas"}}
    return hashlib.sha256(json.dumps(read, sort_keys=True).encode()).hexdigest()[:16]
