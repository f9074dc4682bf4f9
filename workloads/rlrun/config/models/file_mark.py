"""Mark of what a pod reads in the run's configuration file.

A pod's template names it, so that no pod takes the file of another attempt for its own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

VARIABLE = "RLRUN_CONFIG_MARK"
NOT_READ_BY_ENGINES = frozenset({"replicas", "max_steps"})
"""Fields of an engine's section that no engine acts on: they are edited while engines live."""


def file_mark(document: Mapping[str, object], role: str) -> str:
    """16 hex digits over what a pod of `role` acts on in the file.

    Engines outlive attempts, hence for `inference` this is the engines' section alone. Their number, which may change while an attempt
    runs, counts for no role: the orchestrator finds them by their Service.

    Args:
        document: the file, parsed.
        role: of the pod.

    Raises:
        ValueError: the engines' section is no mapping.
    """
    section = document.get("inference") or {}
    if not isinstance(section, Mapping):
        raise ValueError(f"inference is {type(section).__name__}, not a mapping")
    if role == "inference":
        read = {name: value for name, value in section.items() if name not in NOT_READ_BY_ENGINES}
    else:
        read = {**document, "inference": {name: value for name, value in section.items() if name != "replicas"}}
    return hashlib.sha256(json.dumps(read, sort_keys=True).encode()).hexdigest()[:16]
