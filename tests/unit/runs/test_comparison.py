"""Differences of two runs by manifest fields: equal for folders, clusters, Python and the page."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlrun import Run
from rlrun.api.resolve import resolve_spec
from rlrun.api.resource import RLRunSpec
from rlrun.api.run_manifest import manifest_text
from rlrun.cli import plots
from rlrun.cli.main import main
from rlrun.ui.run_registry import run_id
from rlrun.ui.static_files import StaticFiles
from tests.support.made_runs import client, made, page_files
from tests.unit.docs.documented_commands import ROOT
from tests.unit.inspect.recorded import PODS, Recorded, of_run

SPEC: dict[str, Any] = yaml.safe_load((ROOT / "examples/quickstart.yaml").read_text())["spec"]
CHANGES = {
    "environments.0.groupSize": (8, 4),
    "evaluation.samplesPerTask": (1, 2),
    "inference.cpuKvCacheGib": (1, 2),
    "maxSteps": (120, 60),
    "orchestrator.batchSize": (256, 512),
    "sampling.temperature": (1.0, 0.7),
    "trainer.optimizer.lr": (1.5e-4, 5e-4),
    "trainer.scheduler.name": ("constant", "linear"),
}
"""Fields with the value of the example (explicit or default) and the value of the other run."""
EXPECTED = {name: [str(one), str(other)] for name, (one, other) in CHANGES.items()}


def changed(spec: Mapping[str, Any], fields: Mapping[str, tuple[Any, Any]]) -> dict[str, Any]:
    found = copy.deepcopy(dict(spec))
    for name, (_, value) in fields.items():
        *above, last = name.split(".")
        place: Any = found
        for part in above:
            place = place[int(part)] if part.isdecimal() else place.setdefault(part, {})
        place[last] = value
    return found


SPECS = {"a": SPEC, "b": changed(SPEC, CHANGES)}


def write_run(root: Path, spec: Mapping[str, Any], *, with_manifest: bool = True) -> None:
    """Write a run folder as `rlrun local` leaves it, or, without a manifest, as pods leave it."""
    folder = made(root)
    read = RLRunSpec.model_validate(dict(spec))
    config = resolve_spec(read, name=root.name, uid=f"uid-{root.name}", output_dir=str(root))
    folder.write("run.json", config.model_dump_json(by_alias=False))
    if with_manifest:
        folder.write("manifest.yaml", manifest_text(read, root.name))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, spec in SPECS.items():
        write_run(tmp_path / "runs" / name, spec)
    return tmp_path


def of_command(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, list[str]]:
    assert main(["compare", *words, "-o", "json"]) == 0
    found: dict[str, list[str]] = json.loads(capsys.readouterr().out)["differences"]
    return found


def test_folders(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert of_command(capsys, "runs/a", "runs/b") == EXPECTED
    assert main(["compare", "runs/a", "runs/b"]) == 0
    assert ["orchestrator.batchSize", "256", "512"] in [line.split() for line in capsys.readouterr().out.splitlines()]
    assert main(["compare", "runs/a", "runs/a"]) == 0
    assert "are equal" in capsys.readouterr().out


def test_cluster_run_is_compared_with_folder(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = {"env": [{"name": "ANY", "value": "opensesame"}]}
    spec = SPEC | {"orchestrator": SPEC["orchestrator"] | secret}
    meta = {"name": "a", "namespace": "team", "creationTimestamp": "2027-01-15T07:00:00Z"}
    status = {"phase": "Running", "attempt": 1, "storage": {"claimName": "a-data", "path": "/data/a"}}
    recorded: Recorded = of_run(
        {"metadata": meta, "spec": spec, "status": status},
        ("cat /data/a/metrics.jsonl", (here / "runs/a/metrics.jsonl").read_text()),
        pods=PODS,
    )
    monkeypatch.setattr(plots, "cluster_client", lambda _options: recorded.kubectl())
    assert of_command(capsys, "a", "runs/b") == EXPECTED


def test_python(here: Path) -> None:
    text = str(Run.open("runs/a").compare(Run.open("runs/b")))
    rows = [line.split() for line in text.splitlines()]
    assert [row for row in rows if row and row[0] in EXPECTED] == [[name, *values] for name, values in EXPECTED.items()]


@pytest.fixture
def static(tmp_path: Path) -> Any:
    with page_files(tmp_path / "static") as found:
        yield found


def test_page_comparison_shows_same_differences(here: Path, static: StaticFiles) -> None:
    asked, _ = client(here / "runs", static=static)
    found = asked.json("/api/compare", run=[run_id(here / "runs" / name) for name in SPECS])["differences"]
    assert {one["field"]: one["values"] for one in found} == EXPECTED


def test_folder_without_manifest_is_compared_by_configuration(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(here / "runs/c", SPECS["b"], with_manifest=False)
    assert of_command(capsys, "runs/a", "runs/c") == EXPECTED
    assert of_command(capsys, "runs/b", "runs/c") == {}
    pods = changed(SPECS["b"], {"trainer.nodeSelector": (None, {"a": "b"}), "maxSteps": (120, 61)})
    write_run(here / "runs/d", pods)
    assert of_command(capsys, "runs/c", "runs/d") == {"maxSteps": ["60", "61"]}
    assert of_command(capsys, "runs/b", "runs/d") == {"maxSteps": ["60", "61"], "trainer.nodeSelector.a": ["–", "b"]}


def test_missing_block_of_one_run_is_shown(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(here / "runs/c", {name: value for name, value in SPEC.items() if name != "evaluation"})
    found = of_command(capsys, "runs/a", "runs/c")
    assert found["evaluation.interval"] == ["30", "–"]
    assert all(name.startswith("evaluation.") for name in found)


def test_damaged_or_newer_manifest_is_still_compared(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "runs/a/manifest.yaml").write_text("spec: [")
    assert of_command(capsys, "runs/a", "runs/b") == EXPECTED
    (here / "runs/a/manifest.yaml").write_text(json.dumps({"spec": SPEC | {"maxSteps": 9, "ofTomorrow": 1}}))
    found = of_command(capsys, "runs/a", "runs/b")
    assert (found["maxSteps"], found["ofTomorrow"]) == (["9", "60"], ["1", "–"])
