"""Specifications as the operator reads them: strictly, but ignoring fields of a newer release."""

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
    """Result of validating a specification without the cluster."""

    spec: RLRunSpec | None
    """Valid specification, or None."""
    problems: str = ""
    """All problems, each with field, value and fix."""
    ignored: str = ""
    """Unknown fields, which may come from the CRD of a newer release."""


def read_spec(document: Manifest) -> Reading:
    """Validate the specification of an RLRun."""
    try:
        return _validate_spec(document)
    except (
        Exception
    ) as error:  # no content of a user's object may stop the operator: any error means an invalid specification
        log.exception("cannot read the specification of run %s", document["metadata"].get("name"))
        return Reading(None, problems=f"the specification cannot be read ({type(error).__name__}); simplify spec")


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
