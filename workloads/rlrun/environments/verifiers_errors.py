"""What both generations of verifiers' adapters raise."""

from __future__ import annotations


class VerifiersLoadError(ValueError):
    """This environment cannot be run here; the message says why."""
