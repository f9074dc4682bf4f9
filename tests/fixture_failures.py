"""Plugin for pytest: a failed fixture fails one test, skips the other tests that need it, and its folders are kept.

The first test whose fixture fails fails with it, so a session with a failure stays red. Fixtures of a single test are
not affected.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

KEPT = Path(__file__).resolve().parents[1] / "build" / "failed-runs"
"""Folder outside of pytest's own temporary folders, because those of a tier may be in memory and are deleted with it."""
KEPT_FOLDERS = 10
"""Number of kept folders; the oldest ones are deleted."""
CAUSES: dict[str, str] = {}
"""Node id of the test that failed, by the reason with which others were skipped."""
_LEFT_OUT = shutil.ignore_patterns("*.safetensors", "*.distcp", "*.bin", "*.pt", "*.sock", "*.so")
"""Names of files that are not kept: most of a run's bytes, without information about the failure."""


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
) -> Generator[None, object, object]:
    """Set up a fixture. After a failure, skip the other tests that need it, and keep its folders."""
    before = _folders(request)
    try:
        return (yield)
    except (pytest.skip.Exception, KeyboardInterrupt):
        raise
    except BaseException as error:
        if fixturedef.scope != "function":
            test = request._pyfuncitem
            _keep(fixturedef.argname, _folders(request) - before)
            cached = fixturedef.cached_result
            if cached is not None and test.get_closest_marker("xfail") is None:  # otherwise no test would be red
                why = f"{fixturedef.argname} failed in {test.nodeid}: {type(error).__name__}"
                CAUSES[why] = test.nodeid
                skipped = pytest.skip.Exception(why, _use_item_location=True)
                fixturedef.cached_result = (None, cached[1], (skipped, None))
        raise


def _folders(request: pytest.FixtureRequest) -> set[Path]:
    factory: pytest.TempPathFactory = request.config._tmp_path_factory  # type: ignore[attr-defined]
    return set(factory.getbasetemp().iterdir())


def _keep(fixture: str, folders: set[Path]) -> None:
    """Copy the folders of a failed fixture, and print the location in the test's captured output."""
    if not folders:
        return
    kept = KEPT / f"{time.strftime('%Y%m%d-%H%M%S')}-{time.time_ns() % 10**9:09d}-{fixture}"
    for folder in sorted(folders):
        if folder.is_dir() and not folder.is_symlink():
            # Its processes may still write, so files that cannot be copied are left out.
            try:
                shutil.copytree(folder, kept / folder.name, symlinks=True, ignore=_LEFT_OUT)
            except (shutil.Error, OSError) as error:
                print(f"not all of {folder} could be kept: {error}")
    print(f"what {fixture} left is kept in {kept}")
    for old in sorted(KEPT.iterdir())[:-KEPT_FOLDERS]:
        shutil.rmtree(old, ignore_errors=True)
