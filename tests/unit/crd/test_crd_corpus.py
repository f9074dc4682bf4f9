"""The malformed manifests as `rlrun validate` sees them: what the API server refuses, one machine refuses too, in the same words."""

from __future__ import annotations

import re

import pytest

from rlrun.api.manifest import parse_manifest
from rlrun.config.problems import ConfigError
from tests.controlplane.corpus import MALFORMED, Malformed


def test_there_are_enough() -> None:
    stages = [case.stage for case in MALFORMED]
    assert len(stages) >= 60
    assert min(stages.count(stage) for stage in set(stages)) >= 8


@pytest.mark.parametrize("case", MALFORMED, ids=lambda case: case.name)
def test_a_malformed_manifest_is_told_with_field_value_and_fix(case: Malformed) -> None:
    if case.local is None:
        parse_manifest(case.path.read_text(), case.path.name)
        return
    with pytest.raises(ConfigError) as error:
        parse_manifest(case.path.read_text(), case.path.name)
    (line,) = str(error.value).splitlines()
    assert re.search(case.local, line), line
    assert case.field in line
