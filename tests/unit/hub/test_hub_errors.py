"""Errors of the hub's client: missing here, or wrong everywhere."""

from __future__ import annotations

import pytest

from rlrun.hub.fetch import explain_error
from rlrun.hub.repository import Repository
from rlrun.protocol.files.failures import AbsentDataError


@pytest.mark.parametrize(
    ("error", "absent"), [(ConnectionError("refused"), True), (ValueError("no such field"), False)]
)
def test_only_unreachable_hub_counts_as_absent_data(error: Exception, absent: bool) -> None:
    """`rlrun validate` reports absent data as a note, because the run's pods may reach the hub."""
    repository = Repository("dataset", "org/rows", None, "args.name", "args.revision")
    assert isinstance(explain_error(error, repository), AbsentDataError) is absent
