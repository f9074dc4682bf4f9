"""Sources of Prometheus for tests, and the error message without any source."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.cluster import ClusterError, prometheus


def install_programs(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for command in prometheus.COMMANDS:
        (folder / command).write_text("#!/bin/sh\n")
        (folder / command).chmod(0o755)
    return folder


@pytest.fixture(autouse=True)
def nothing_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Empty cache, and no program on PATH."""
    monkeypatch.setenv("RLRUN_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("RLRUN_PROMETHEUS_BIN", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None)


def test_configured_folder_precedes_prometheus_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cached = install_programs(tmp_path / "cache/bin/prometheus-package")
    assert prometheus.find(print, download=False)["promtool"] == cached / "promtool"
    given = install_programs(tmp_path / "given")
    monkeypatch.setenv("RLRUN_PROMETHEUS_BIN", str(given))
    assert prometheus.find(print, download=False)["prometheus"] == given / "prometheus"


def test_missing_prometheus_source_names_the_alternatives() -> None:
    assert prometheus.find(print, download=False) == {}
    with pytest.raises(
        ClusterError, match=r"no prometheus on PATH, and this is no Debian: .* set RLRUN_PROMETHEUS_BIN"
    ):
        prometheus.find(print, download=True)
