"""SPDX documents list exactly the content of the lock files."""

from __future__ import annotations

import hashlib
import json
import re
import zipfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tools import sbom
from tools.images import IMAGES, ROOT, version

CREATED = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
LOCKS = {
    "trainer": ["images/common-{}", "images/trainer-{}", "images/trackers"],
    "inference": ["images/common-{}", "images/inference-{}"],
    "operator": ["operator"],
}
"""Sources of each image, listed manually."""
DIGEST = "sha256:" + "a" * 64
BASE = {"name": "docker.io/library/ubuntu:24.04", "digest": "sha256:" + "b" * 64}


def locked(image: str, accelerator: str) -> dict[str, tuple[str, set[str]]]:
    """Return name -> version and hashes, parsed without the expressions of the tool."""
    found: dict[str, tuple[str, set[str]]] = {}
    current: set[str] = set()
    of_gpus = ["images/flash-attention-3"] if accelerator == "gpu" and image in ("trainer", "inference") else []
    for name in (*LOCKS[image], *of_gpus):
        for line in (ROOT / "requirements" / f"{name.format(accelerator)}.txt").read_text().splitlines():
            if "==" in line and not line.startswith((" ", "#")):
                package, _, rest = line.removesuffix("\\").partition("==")
                current = set()
                found[package.partition("[")[0]] = (rest.partition(";")[0].strip(), current)
            elif "--hash=sha256:" in line:
                current.add(line.removesuffix("\\").strip().removeprefix("--hash=sha256:"))
    return found


def packages(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {
        entry["externalRefs"][0]["referenceLocator"]: entry
        for entry in document["packages"]
        if entry["externalRefs"][0]["referenceLocator"].startswith("pkg:pypi/") and entry["checksums"]
    }


@pytest.mark.parametrize("accelerator", ["gpu", "cpu"])
def test_image_sbom_lists_packages_of_its_locks(accelerator: str) -> None:
    made = sbom.documents(accelerator, CREATED)
    assert set(made) == {f"rlrun-{image}" for image in IMAGES}
    for image in IMAGES:
        expected = locked(image, accelerator)
        listed = packages(made[f"rlrun-{image}"])
        assert {entry["name"]: entry["versionInfo"] for entry in listed.values()} == {
            name: number for name, (number, _) in expected.items()
        }
        for purl, entry in listed.items():
            assert purl == f"pkg:pypi/{entry['name']}@{entry['versionInfo'].replace('+', '%2B')}"
            assert {sum_["checksumValue"] for sum_ in entry["checksums"]} == expected[entry["name"]][1]
            assert {sum_["algorithm"] for sum_ in entry["checksums"]} == {"SHA256"}


DEBIAN = {"python3", "python3-venv", "ca-certificates"}
UBUNTU = DEBIAN | {"python3-dev", "gcc", "g++", "libc6-dev", "libibverbs1", "ibverbs-providers"}


def system_packages(document: dict[str, Any]) -> set[str]:
    locators = {reference["referenceLocator"] for entry in document["packages"] for reference in entry["externalRefs"]}
    return {locator for locator in locators if locator.startswith("pkg:deb/")}


def test_image_sbom_lists_system_packages_of_its_base() -> None:
    gpu, cpu = sbom.documents("gpu", CREATED), sbom.documents("cpu", CREATED)
    for role in ("rlrun-trainer", "rlrun-inference"):
        assert system_packages(gpu[role]) == {f"pkg:deb/ubuntu/{name}" for name in UBUNTU}
        assert system_packages(cpu[role]) == {f"pkg:deb/debian/{name}" for name in DEBIAN | {"libnuma1"}}
    assert system_packages(gpu["rlrun-operator"]) == {f"pkg:deb/debian/{name}" for name in DEBIAN}
    with pytest.raises(sbom.SbomError, match="lacks the line ARG SYSTEM_PACKAGES"):
        sbom.system_parts("FROM a AS b\n", "a")


def test_sbom_of_devel_images_adds_cuda_compiler_only() -> None:
    plain, devel = sbom.documents("gpu", CREATED), sbom.documents("gpu", CREATED, devel=True)
    compiler = dict(re.findall(r"^([a-z-]+)==([^ ]+)", (ROOT / sbom.COMPILER_LOCK).read_text(), re.MULTILINE))
    assert "nvidia-cuda-nvcc" in compiler
    for image in IMAGES:
        name = f"rlrun-{image}"
        versions = {entry["name"]: entry["versionInfo"] for entry in packages(plain[name]).values()}
        expected = versions if image == "operator" else versions | compiler
        assert {entry["name"]: entry["versionInfo"] for entry in packages(devel[name]).values()} == expected
    engine = {entry["name"]: entry["versionInfo"] for entry in packages(plain["rlrun-inference"]).values()}
    assert "nvidia-cuda-nvcc" not in engine, "humming-kernels requires it, and compiles without it"


def test_unknown_stage_is_refused() -> None:
    with pytest.raises(sbom.SbomError, match="no stage 'devel', only a, b"):
        sbom.image_stages("FROM x AS a\nRUN 1\nFROM a AS b\n", "devel")
    assert sbom.image_stages("FROM x AS a\nRUN 1\nFROM y AS c\nRUN 3\nFROM a AS b\nRUN 2\n") == [
        "\nRUN 1\n",
        "\nRUN 2\n",
    ]


def test_sbom_is_valid_spdx_and_reproducible() -> None:
    made = sbom.documents("gpu", CREATED)
    for name, content in made.items():
        assert content["spdxVersion"] == "SPDX-2.3"
        assert content["creationInfo"]["created"] == "2026-01-02T03:04:05Z"
        identifiers = [entry["SPDXID"] for entry in content["packages"]]
        assert len(set(identifiers)) == len(identifiers)
        assert all(re.fullmatch(r"SPDXRef-[A-Za-z0-9.-]+", identifier) for identifier in identifiers)
        related = [(link["relationshipType"], link["relatedSpdxElement"]) for link in content["relationships"]]
        assert related == [("DESCRIBES", f"SPDXRef-{name}"), *(("CONTAINS", other) for other in identifiers[1:])]
        assert all("downloadLocation" in entry for entry in content["packages"])
    assert made == sbom.documents("gpu", CREATED)
    assert len({content["documentNamespace"] for content in made.values()}) == len(made)


def test_image_base_and_page_are_named_by_their_hashes() -> None:
    values = f"image: ghcr.io/rlrun/rlrun-operator@sha256:{'0' * 64}\nimages:\n  trainer: ghcr.io/rlrun/rlrun-trainer@{DIGEST}\n"
    made = sbom.documents("gpu", CREATED, values=values, bases={"rlrun-trainer": BASE})
    subject, base, *others = made["rlrun-trainer"]["packages"]
    package = next(entry for entry in others if entry["name"] == "rlrun")
    assert subject["checksums"] == [{"algorithm": "SHA256", "checksumValue": "a" * 64}]
    assert subject["externalRefs"][0]["referenceLocator"] == (
        f"pkg:oci/rlrun-trainer@sha256%3A{'a' * 64}?repository_url=ghcr.io/rlrun/rlrun-trainer"
    )
    assert (base["name"], base["versionInfo"], base["checksums"][0]["checksumValue"]) == ("ubuntu", "24.04", "b" * 64)
    assert package["versionInfo"] == version()
    assert made["rlrun-operator"]["packages"][0]["checksums"][0]["checksumValue"] == "0" * 64
    lock = json.loads((ROOT / sbom.PAGE_LOCK).read_text())
    for content in made.values():
        page = {entry["name"]: entry for entry in content["packages"] if "npm/" in str(entry["externalRefs"])}
        assert set(page) == set(lock["packages"][""]["dependencies"]), "what is for development is not in the page"
        assert all(len(entry["checksums"][0]["checksumValue"]) == 128 for entry in page.values())


def test_wheel_sbom_lists_hash_and_requirements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sbom, "commit_time", lambda: CREATED)
    wheel = tmp_path / "rlrun-1.2-py3-none-any.whl"
    metadata = "Name: rlrun\nVersion: 1.2\nRequires-Dist: PyYAML>=6\nRequires-Dist: rlrun[cli]; extra == 'local'\n"
    metadata += "Requires-Dist: torch==2.13.0; extra == 'trainer'\nRequires-Dist: pyyaml<9; extra == 'x'\n\ntext\n"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("rlrun-1.2.dist-info/METADATA", metadata)
    assert sbom.main(["--output-dir", str(tmp_path), "--wheel", str(wheel)]) == 0
    content = json.loads((tmp_path / f"{wheel.name}.spdx.json").read_text())
    subject, *others = content["packages"]
    assert (subject["name"], subject["versionInfo"]) == ("rlrun", "1.2")
    assert subject["checksums"][0]["checksumValue"] == hashlib.sha256(wheel.read_bytes()).hexdigest()
    needed = [
        link["relatedSpdxElement"] for link in content["relationships"] if link["relationshipType"] == "DEPENDS_ON"
    ]
    asked = {entry["name"]: entry for entry in others if entry["SPDXID"] in needed}
    assert set(asked) == {"pyyaml", "torch"}
    assert asked["pyyaml"]["comment"] == "Required as: PyYAML>=6 | pyyaml<9; extra == 'x'"
    wheel.write_text("no archive")
    assert sbom.main(["--output-dir", str(tmp_path), "--wheel", str(wheel)]) == 1
    assert "it is not a wheel" in capsys.readouterr().err


@pytest.mark.parametrize("line", ["kopf>=1.0", "kopf==1.0", "kopf==1.0 --hash=md5:0", "./kopf"])
def test_lock_with_unpinned_package_is_refused(line: str) -> None:
    with pytest.raises(sbom.SbomError, match="pins no package by version and hash"):
        sbom.locked_parts(f"# a comment\n{line}\n", "a.txt")


def test_two_versions_in_one_image_are_refused() -> None:
    first, second = (
        sbom.locked_parts(f"a-b=={number} \\\n    --hash=sha256:{'0' * 64}\n", "a.txt") for number in (1, 2)
    )
    assert sbom.merged([*first, *first]) == first
    with pytest.raises(sbom.SbomError, match="a-b has versions 1 and 2"):
        sbom.merged([*first, *second])


def test_page_package_without_hash_is_refused() -> None:
    lock = {"packages": {"": {}, "node_modules/preact": {"version": version()}}}
    with pytest.raises(sbom.SbomError, match="preact lacks a sha512 integrity"):
        sbom.page_parts(lock)
