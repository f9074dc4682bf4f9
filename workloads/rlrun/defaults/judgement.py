"""Specifications read as the operator reads them: strictly, and with fields of a newer release left out."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from pydantic import ValidationError

from rlrun.api.resource import RLRun, RLRunSpec
from rlrun.config.loading.examine import validate_layer
from rlrun.config.loading.layers import Reader
from rlrun.config.loading.problems import ConfigError
from rlrun.defaults.words import bound_message
from rlrun.runtime.json_types import Manifest

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Reading:
    """Validation of a specification without the cluster."""

    spec: RLRunSpec | None
    """None: it is invalid."""
    problems: str = ""
    """Field, value and fix of everything that is wrong."""
    ignored: str = ""
    """Fields that this release does not know: the CRD may be of a newer one."""


def read_spec(document: Manifest) -> Reading:
    """The specification of an RLRun."""
    try:
        return _validate_spec(document)
    except Exception as error:  # the only place that reads what users write: whatever a reader does not bear is an invalid specification
        log.exception("run %s: its specification could not be read", document["metadata"].get("name"))
        return Reading(None, problems=f"the specification cannot be read ({type(error).__name__}): simplify spec")


def _validate_spec(document: Manifest) -> Reading:
    try:
        return Reading(RLRun.model_validate(document, strict=True).spec)
    except ValidationError:
        pass
    layer = Reader(RLRun, "", camel_only=True).read(document)
    ignored = bound_message(problem.path for problem in layer.problems)
    layer.problems.clear()
    try:
        return Reading(validate_layer(RLRun, layer).spec, ignored=ignored)
    except ConfigError as error:
        return Reading(None, problems=bound_message(str(problem) for problem in error.problems))
