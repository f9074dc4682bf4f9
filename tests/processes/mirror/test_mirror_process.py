"""Mirror process of a run, with a local folder as object storage."""

from __future__ import annotations

import os
from pathlib import Path

from rlrun.api.resolve import resolve_spec
from rlrun.api.resource import RLRunSpec
from rlrun.cli.main import main
from rlrun.config.models.run_config import RunConfig
from rlrun.mirror.mirror_starter import mirror_beside
from rlrun.protocol.files.checkpoint_manifest import (
    Manifest,
    describe_part,
    read_manifest,
    verify_files,
    write_manifest,
)
from rlrun.protocol.files.durable import write_bytes
from rlrun.protocol.files.paths import RunPaths
from tests.support.programs import wait_for

UID = "11111111-2222-3333-4444-555555555555"


def make_run(root: Path, url: str) -> RunConfig:
    document = {"model": {"tiny": {}}, "maxSteps": 4, "environments": [{"id": "reverse-text"}]}
    storage = {"claimTemplate": {}, "mirror": {"url": url}}
    config = resolve_spec(
        RLRunSpec.model_validate(document | {"storage": storage}), name="run", uid=UID, output_dir=str(root)
    )
    write_bytes(RunPaths(root).run_json, config.model_dump_json().encode())
    return config


def write_checkpoint(root: Path, step: int) -> str:
    folder = RunPaths(root).checkpoint(step, 1)
    (folder / "trainer").mkdir(parents=True)
    (folder / "trainer" / "shard").write_bytes(os.urandom(100_000))
    write_manifest(
        folder, Manifest(step, 1, 1, "hash", tuple(describe_part(folder, folder / "trainer")), created_at=0.0)
    )
    return folder.name


def test_checkpoints_are_mirrored_during_and_after_run(tmp_path: Path) -> None:
    root, there = tmp_path / "run", tmp_path / "there"
    config, said = make_run(root, f"file://{there}"), list[str]()
    first = write_checkpoint(root, 2)
    with mirror_beside(config, RunPaths(root).run_json, os.environ, say=said.append, hurry=lambda: False):
        copied = there / "run" / "checkpoints" / first / "manifest.json"
        wait_for(copied.exists, "a copy of the first checkpoint", state=(root / "logs" / "mirror.log").read_text)
        last = write_checkpoint(root, 4)
    assert said == []
    for name in (first, last):
        copy = there / "run" / "checkpoints" / name
        verify_files(copy, read_manifest(copy))


def test_failed_copies_are_reported_and_copied_by_command(tmp_path: Path) -> None:
    root, there = tmp_path / "run", tmp_path / "there"
    there.write_text("a file where a folder is to be")
    config, said = make_run(root, f"file://{there}"), list[str]()
    name = write_checkpoint(root, 2)
    with mirror_beside(config, RunPaths(root).run_json, os.environ, say=said.append, hurry=lambda: False):
        pass
    assert len(said) == 1
    assert f"`rlrun mirror {root}` copies them" in said[0]
    assert "Not a directory" in (root / "logs" / "mirror.log").read_text()
    assert main(["mirror", str(root)]) != 0
    there.unlink()
    assert main(["mirror", str(root)]) == 0
    copy = there / "run" / "checkpoints" / name
    verify_files(copy, read_manifest(copy))
    assert main(["mirror", str(root), "--url", f"file://{tmp_path}/elsewhere"]) == 0
    assert (tmp_path / "elsewhere" / "run" / "checkpoints" / name / "manifest.json").exists()
    assert main(["mirror", str(root), "--url", "elsewhere"]) != 0
