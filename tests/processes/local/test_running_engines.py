"""Running engines of a local run: refused engines, and roles that are not started."""

from __future__ import annotations

import argparse
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlrun.api.resolve import resolve_spec
from rlrun.api.resource import RLRunSpec
from rlrun.config.models.run_config import RunConfig
from rlrun.local.local_command import local_parser
from rlrun.local.preflight import PreflightError, check_folder
from rlrun.local.process_plan import Ports, with_endpoints
from rlrun.local.shared_processes import check_engines
from rlrun.protocol.files.durable import write_json
from rlrun.protocol.files.paths import RunPaths


@pytest.fixture
def url() -> Iterator[str]:
    """Address with a listener."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def make_config(**spec: Any) -> RunConfig:
    document = {"model": {"path": "m"}, "environments": [{"id": "arithmetic"}], **spec}
    return resolve_spec(RLRunSpec.model_validate(document), name="x", uid="u", output_dir="out")


def parse_options(*words: str) -> argparse.Namespace:
    return local_parser().parse_args(["run.yaml", *words])


def test_run_uses_running_engine_and_starts_none(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLRUN_API_KEY", "key-of-the-engine")
    assert check_engines(parse_options("--engine-url", url), make_config(), RunPaths(tmp_path)) == "key-of-the-engine"
    (placed,) = with_endpoints(make_config(inference={"replicas": 2}), Ports(1, 2, 3, ()), None, running=[url])
    assert placed.orchestrator.inference_urls == [url]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--inference-port", "8000"], "--inference-port applies to engines that are started here"),
        (["--engine-url", "127.0.0.1:8000"], r"got '127\.0\.0\.1:8000', expected the root of a server"),
        (
            ["--engine-url", "http://127.0.0.1:1/"],
            r"no engine answers at http://127\.0\.0\.1:1/ \(Connection refused\)",
        ),
        ([], "--engine-url needs RLRUN_API_KEY in the environment"),
    ],
)
def test_contradictory_engine_options_are_refused(
    url: str, words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RLRUN_API_KEY", raising=False)
    with pytest.raises(PreflightError, match=message):
        check_engines(parse_options("--engine-url", url, *words), make_config(), RunPaths(tmp_path))


def test_engine_of_another_run_is_refused(url: str, tmp_path: Path) -> None:
    write_json(RunPaths(tmp_path).identity, {"name": "other", "uid": "u"})
    with pytest.raises(PreflightError, match="was started for the run 'other', but this run is 'x'"):
        check_engines(parse_options("--engine-url", url), make_config(), RunPaths(tmp_path))


def test_engine_files_do_not_count_as_run(tmp_path: Path) -> None:
    write_json(RunPaths(tmp_path).identity, {"name": "x", "uid": "u"})
    with pytest.raises(PreflightError, match="is not empty"):
        check_folder(tmp_path, resume=False)
    check_folder(tmp_path, resume=False, engines=True)
    (tmp_path / "run.json").touch()
    with pytest.raises(PreflightError, match="is not empty"):
        check_folder(tmp_path, resume=False, engines=True)
