"""Errors of the adapters for verifiers 0.1 and 0.4."""

from __future__ import annotations


class VerifiersLoadError(ValueError):
    """Error for a verifiers environment that is not supported. The message contains the reason."""
