"""Errors of the adapters for both generations of verifiers."""

from __future__ import annotations


class VerifiersLoadError(ValueError):
    """Error for an environment that cannot be run here; the message has the reason."""
