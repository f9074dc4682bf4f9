"""Committed page, compared with the build of its sources."""

from __future__ import annotations

from pathlib import Path

from tests.browser.conftest import cannot
from tools.ui_bundle import BUILT, BundleError, build, differences


def test_committed_page_equals_build_of_sources(tmp_path: Path) -> None:
    try:
        build(tmp_path / "static")
    except BundleError as error:
        if "is not installed" in str(error):
            cannot(str(error))
        raise
    assert differences(BUILT, tmp_path / "static") == [], "run: make ui"
