"""Where Prometheus comes from for tests, and what is said when there is no way to get it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.cluster import ClusterError, prometheus


def install(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for command in prometheus.COMMANDS:
        (folder / command).write_text("#!/bin/sh\n")
        (folder / command).chmod(0o755)
    return folder


@pytest.fixture(autouse=True)
def nothing_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty cache, and no program on PATH."""
    monkeypatch.setenv("RLRUN_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("RLRUN_PROMETHEUS_BIN", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None)


def test_a_given_folder_comes_before_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cached = install(tmp_path / "cache/bin/prometheus-package")
    assert prometheus.find(print, download=False)["promtool"] == cached / "promtool"
    given = install(tmp_path / "given")
    monkeypatch.setenv("RLRUN_PROMETHEUS_BIN", str(given))
    assert prometheus.find(print, download=False)["prometheus"] == given / "prometheus"


def test_without_any_source_there_is_none_or_a_message_with_the_ways() -> None:
    assert prometheus.find(print, download=False) == {}
    with pytest.raises(
        ClusterError, match=r"no prometheus on PATH, and this is no Debian: .* set RLRUN_PROMETHEUS_BIN"
    ):
        prometheus.find(print, download=True)
