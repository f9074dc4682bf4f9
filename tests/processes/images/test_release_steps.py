"""Check steps of release.yaml before signing: run unchanged, on possible results of a builder."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

WORKFLOW = Path(__file__).parents[3] / ".github/workflows/release.yaml"
REGISTRY = "ghcr.io/rlrun"
IMAGE, CHART = "a" * 64, "b" * 64


def run_check(job: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the check step of a job as a runner does: `bash -e`."""
    steps = yaml.safe_load(WORKFLOW.read_text())["jobs"][job]["steps"]
    (command,) = [step["run"] for step in steps if step.get("name", "").startswith("Check ")]
    environment = {"PATH": os.environ["PATH"], "REGISTRY": REGISTRY, **variables}
    return subprocess.run(["bash", "-e", "-c", command], cwd=folder, env=environment, capture_output=True, text=True)


def handed_over(folder: Path, archive: str, name: str, content: str) -> str:
    """Write an archive with one file; return its SHA-256."""
    made = folder / "made"
    made.mkdir()
    (made / name).write_text(content)
    with tarfile.open(folder / archive, "w") as writer:
        writer.add(made, arcname=".")
    return hashlib.sha256((folder / archive).read_bytes()).hexdigest()


def sbom_of(digest: str) -> str:
    return json.dumps({"packages": [{"checksums": [{"checksumValue": digest}]}]})


def make_release(folder: Path, digest: str = IMAGE) -> dict[str, str]:
    return {
        "SHA256": handed_over(folder, "sbom.tar", "rlrun-operator.spdx.json", sbom_of(digest)),
        "IMAGES": f"{REGISTRY}/rlrun-operator@sha256:{IMAGE}",
        "CHARTS": f"{REGISTRY}/charts/rlrun-operator@sha256:{CHART}",
    }


def test_matching_artifacts_become_provenance_subjects(tmp_path: Path) -> None:
    done = run_check("sign", tmp_path, **make_release(tmp_path))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "subjects.txt").read_text().splitlines() == [
        f"{IMAGE}  {REGISTRY}/rlrun-operator",
        f"{CHART}  {REGISTRY}/charts/rlrun-operator",
    ]


@pytest.mark.parametrize(
    "change",
    [
        lambda given: given | {"SHA256": "0" * 64},
        lambda given: given | {"SHA256": ""},
        lambda given: given | {"IMAGES": ""},
        lambda given: given | {"CHARTS": ""},
        lambda given: given | {"IMAGES": f"{REGISTRY}/rlrun-operator:1"},
        lambda given: given | {"IMAGES": f"ghcr.io/other/rlrun-operator@sha256:{IMAGE}"},
        lambda given: given | {"IMAGES": f"{REGISTRY}/rlrun-trainer@sha256:{IMAGE} {given['IMAGES']}"},
        lambda given: given | {"IMAGES": f"{REGISTRY}/rlrun-operator@sha256:{CHART}"},
        lambda given: given | {"CHARTS": f"{given['CHARTS']} --allow-insecure-registry"},
    ],
    ids=["sum", "no sum", "no image", "no chart", "tag", "registry", "no SBOM", "other image", "option"],
)
def test_mismatched_artifacts_fail_the_job(tmp_path: Path, change: Callable[[dict[str, str]], dict[str, str]]) -> None:
    assert run_check("sign", tmp_path, **change(make_release(tmp_path))).returncode != 0


def test_wheel_is_unpacked_only_with_builder_checksum(tmp_path: Path) -> None:
    digest = handed_over(tmp_path, "wheel.tar", "rlrun.whl", "a wheel")
    for wrong in ("0" * 64, ""):
        assert run_check("wheel", tmp_path, SHA256=wrong).returncode != 0
        assert not (tmp_path / "dist").exists()
    assert run_check("wheel", tmp_path, SHA256=digest).returncode == 0
    assert (tmp_path / "dist/rlrun.whl").read_text() == "a wheel"
