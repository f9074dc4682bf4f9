"""Fixture of a server without the files of its page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rlrun.ui.static_files import StaticFiles
from tests.support.made_runs import page_files


@pytest.fixture
def static(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StaticFiles]:
    folder: Path = tmp_path_factory.mktemp("page") / "static"
    with page_files(folder) as found:
        yield found
