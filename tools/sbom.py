"""`python -m tools.sbom --output-dir DIR`: SPDX 2.3 documents of the images and of the wheel, from the lock files.

An image's build installs exactly its lock file, by version and hash, so the lock file is the list; nothing has to be
installed or scanned. The content of a base image is in buildx's own attestation (`tools.images --release`). Needs only
Python.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.parser import HeaderParser
from pathlib import Path
from typing import Any
from urllib.parse import quote

from tools.images import CPU_ARGUMENTS, DEVEL, IMAGES, ROOT, Wanted, base_name, version

PAGE_LOCK = "workloads/rlrun/ui/web/package-lock.json"
COMPILER_LOCK = "requirements/images/nvcc.txt"
_PIN = re.compile(r"([A-Za-z0-9][\w.-]*)(?:\[[^\]]*\])?==([^\s;\\]+)((?:\s+--hash=sha256:[0-9a-f]{64})+)")
_COPIED = re.compile(r"^COPY (requirements/\S+\.txt) (?:tools/\S+ )?/opt/requirements/", re.MULTILINE)
_COPIED_STAGE = re.compile(r"^COPY --from=(\S+) ", re.MULTILINE)
_SYSTEM_PACKAGES = re.compile(r'^ARG SYSTEM_PACKAGES="([^"]+)"$', re.MULTILINE)
_REFERENCE = re.compile(r"^\s*\w+: (\S+/rlrun-(\w+))@(sha256:[0-9a-f]{64})$", re.MULTILINE)


class SbomError(Exception):
    """A lock file or a wheel cannot be listed completely."""


@dataclass(frozen=True)
class Part:
    """A package of a document."""

    name: str
    version: str
    purl: str
    checksums: tuple[tuple[str, str], ...]
    """Pairs of SPDX algorithm and hexadecimal value; for a lock file, one for each accepted file."""
    comment: str = ""

    def as_spdx(self, identifier: str) -> dict[str, object]:
        """Return the package as SPDX 2.3 JSON."""
        written: dict[str, object] = {
            "SPDXID": identifier,
            "name": self.name,
            "downloadLocation": "NOASSERTION",
            "filesAnalyzed": False,
            "checksums": [{"algorithm": algorithm, "checksumValue": value} for algorithm, value in self.checksums],
            "externalRefs": [
                {"referenceCategory": "PACKAGE-MANAGER", "referenceType": "purl", "referenceLocator": self.purl}
            ],
        }
        written |= {"versionInfo": self.version} if self.version else {}
        written |= {"comment": self.comment} if self.comment else {}
        return written


def locked_parts(text: str, name: str) -> list[Part]:
    """Return packages of a lock file of Python.

    Raises:
        SbomError: a line does not pin a package by version and hash.
    """
    lines = re.sub(r"\\\n", " ", re.sub(r"^\s*#.*$", "", text, flags=re.MULTILINE)).splitlines()
    found = []
    for line in filter(None, map(str.strip, lines)):
        pin = _PIN.fullmatch(line)
        if pin is None:
            raise SbomError(f"{name}: {line[:60]!r} pins no package by version and hash; run make lock")
        package = re.sub(r"[-_.]+", "-", pin[1]).lower()
        hashes = tuple(("SHA256", value) for value in re.findall(r"sha256:([0-9a-f]{64})", pin[3]))
        found.append(Part(package, pin[2], f"pkg:pypi/{package}@{quote(pin[2], safe='.')}", hashes))
    return found


def page_parts(lock: Mapping[str, Any]) -> list[Part]:
    """Return packages of npm in the built web page: those of package-lock.json that are not for development.

    Raises:
        SbomError: a package has no hash.
    """
    found = []
    for path, entry in lock["packages"].items():
        if not path or entry.get("dev"):
            continue
        name = path.rpartition("node_modules/")[2]
        algorithm, _, value = entry.get("integrity", "").partition("-")
        if algorithm != "sha512":
            raise SbomError(f"{PAGE_LOCK}: {name} lacks a sha512 integrity hash; run npm install in its folder")
        checksum = ("SHA512", base64.b64decode(value).hex())
        locator = f"pkg:npm/{quote(name, safe='/')}@{entry['version']}"
        found.append(Part(name, entry["version"], locator, (checksum,), "Built into the web page."))
    return found


def merged(parts: Iterable[Part]) -> list[Part]:
    """Return each package once, by name.

    Raises:
        SbomError: two lock files of one image have different versions.
    """
    known: dict[str, Part] = {}
    for part in parts:
        if known.setdefault(part.purl.partition("@")[0], part).version != part.version:
            other = known[part.purl.partition("@")[0]].version
            raise SbomError(f"{part.name} has versions {other} and {part.version} in one image; run make lock")
    return [known[key] for key in sorted(known)]


def locked_in_order(locks: Sequence[str]) -> list[Part]:
    """Return packages of an image's lock files. The lock of the CUDA compiler is the last one and replaces versions: the engine's own
    dependencies bring a newer compiler, which refuses the headers of the locked CUDA runtime.

    Raises:
        SbomError: two other lock files have different versions of a package, or one is incomplete.
    """
    parts = {lock: locked_parts((ROOT / lock).read_text(), lock) for lock in locks}
    compiler = parts.pop(COMPILER_LOCK, [])
    replaced = {part.name for part in compiler}
    rest = [part for found in parts.values() for part in found if part.name not in replaced]
    return merged([*rest, *compiler])


def image_stages(dockerfile: str, target: str | None = None) -> list[str]:
    """Return the texts of the stages on which an image is built, the base first, without stages from which it only copies files.

    Args:
        dockerfile: text of the Dockerfile.
        target: name of the last stage; default: the last one of the file.

    Raises:
        SbomError: the file has no such stage.
    """
    parts = re.split(r"^FROM (\S+) AS (\S+)$", dockerfile, flags=re.MULTILINE)
    stages = {name: (parent, text) for parent, name, text in zip(parts[1::3], parts[2::3], parts[3::3], strict=True)}
    name = target or next(reversed(stages), "")
    if name not in stages:
        raise SbomError(f"the Dockerfile has no stage {name!r}, only {', '.join(stages)}")
    found = []
    while name in stages:
        name, text = stages[name]
        found.append(text)
    return found[::-1]


def image_locks(dockerfile: str, accelerator: str, target: str | None = None) -> list[str]:
    """Return lock files from which an image's build installs, as its Dockerfile copies them, without those of uv and of
    build tools. Only GPU images contain a part of the wheels of flash-attention-3.txt."""
    text = "".join(image_stages(dockerfile, target))
    text += "".join(stage for name in _COPIED_STAGE.findall(text) for stage in image_stages(dockerfile, name))
    left_out = ("/build.txt",) if accelerator == "gpu" else ("/build.txt", "/flash-attention-3.txt")
    named = dict.fromkeys(name.replace("${ACCELERATOR}", accelerator) for name in _COPIED.findall(text))
    return [name for name in named if not name.endswith(left_out)]


def system_parts(dockerfile: str, base: str, packages: str | None = None) -> list[Part]:
    """Return the distribution's packages that an image's build installs, without versions: apt takes the newest of that day, and the
    attestation of buildx has them.

    Args:
        dockerfile: text of the Dockerfile.
        base: name of the base image, such as `ubuntu:24.04`.
        packages: value of SYSTEM_PACKAGES; default: that of the Dockerfile.

    Raises:
        SbomError: the Dockerfile has no SYSTEM_PACKAGES.
    """
    if packages is None:
        found = _SYSTEM_PACKAGES.search(dockerfile)
        if found is None:
            raise SbomError('the Dockerfile lacks the line ARG SYSTEM_PACKAGES="NAMES"')
        packages = found[1]
    system = base.rpartition("/")[2].partition(":")[0]
    comment = (
        f"Installed by apt in the build, on {base}; the attestation of the build has the version and dependencies."
    )
    return [Part(name, "", f"pkg:deb/{system}/{name}", (), comment) for name in packages.split()]


def document(subject: Part, contained: Sequence[Part], needed: Sequence[Part], created: datetime) -> dict[str, Any]:
    """Return an SPDX 2.3 document.

    Args:
        subject: what the document describes.
        contained: packages inside of it.
        needed: packages that it depends on and that are not inside.
        created: time of the sources, so that the same sources give the same document.
    """
    root = f"SPDXRef-{subject.name}"
    packages = [subject.as_spdx(root)]
    relations = [("SPDXRef-DOCUMENT", "DESCRIBES", root)]
    for relation, parts in (("CONTAINS", contained), ("DEPENDS_ON", needed)):
        for part in parts:
            identifier = f"SPDXRef-Package-{len(packages)}"
            packages.append(part.as_spdx(identifier))
            relations.append((root, relation, identifier))
    digest = hashlib.sha256(json.dumps([packages, relations], sort_keys=True).encode()).hexdigest()
    return {
        "spdxVersion": "SPDX-2.3",
        "dataLicense": "CC0-1.0",
        "SPDXID": "SPDXRef-DOCUMENT",
        "name": f"{subject.name}-{subject.version}",
        "documentNamespace": f"https://rlrun.io/spdx/{subject.name}-{subject.version}-{digest[:32]}",
        "creationInfo": {
            "created": f"{created:%Y-%m-%dT%H:%M:%SZ}",
            "creators": [f"Tool: rlrun-tools.sbom-{version()}"],
        },
        "packages": packages,
        "relationships": [
            {"spdxElementId": source, "relationshipType": relation, "relatedSpdxElement": target}
            for source, relation, target in relations
        ],
    }


def image_subject(image: str, values: str) -> Part:
    """Return an image by its digest in a file of Helm values, or without a digest if there is none."""
    name = f"rlrun-{image}"
    for repository, found, digest in _REFERENCE.findall(values):
        if found == image:
            locator = f"pkg:oci/{name}@{quote(digest, safe='')}?repository_url={quote(repository, safe='/')}"
            return Part(name, version(), locator, (("SHA256", digest.removeprefix("sha256:")),))
    return Part(name, version(), f"pkg:oci/{name}@{version()}", ())


def base_parts(bases: Mapping[str, Mapping[str, str]], image: str) -> list[Part]:
    """Return the base image of an image, as recorded by `tools.images --release`."""
    if f"rlrun-{image}" not in bases:
        return []
    base = bases[f"rlrun-{image}"]
    repository, _, tag = base["name"].rpartition(":")
    name, digest = repository.rpartition("/")[2], base["digest"]
    locator = f"pkg:oci/{name}@{quote(digest, safe='')}?repository_url={quote(repository, safe='/')}&tag={tag}"
    return [Part(name, tag, locator, (("SHA256", digest.removeprefix("sha256:")),), "Base image.")]


def wheel_parts(wheel: Path) -> tuple[Part, list[Part]]:
    """Return a wheel by its hash, and the packages that its metadata requires, as ranges without a version.

    Raises:
        SbomError: the file is not a wheel.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            (metadata,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
            headers = HeaderParser().parsestr(archive.read(metadata).decode())
    except (zipfile.BadZipFile, ValueError) as error:
        raise SbomError(f"{wheel}: it is not a wheel ({error}); build it with make wheel") from None
    name, number = headers["Name"], headers["Version"]
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    needed: dict[str, list[str]] = {}
    for requirement in headers.get_all("Requires-Dist", []):
        package = re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", requirement)[0]).lower()
        if package != name:
            needed.setdefault(package, []).append(requirement)
    return Part(name, number, f"pkg:pypi/{name}@{number}", (("SHA256", digest),)), [
        Part(package, "", f"pkg:pypi/{package}", (), "Required as: " + " | ".join(asked))
        for package, asked in sorted(needed.items())
    ]


def documents(
    accelerator: str,
    created: datetime,
    *,
    values: str = "",
    bases: Mapping[str, Mapping[str, str]] | None = None,
    devel: bool = False,
) -> dict[str, dict[str, Any]]:
    """Return the document of each image, by the image's name.

    Args:
        accelerator: gpu or cpu.
        created: time of the sources.
        values: content of images.yaml, which has the digests of the images.
        bases: images of base-images.json.
        devel: whether trainer and engine are those of the target `devel`.

    Raises:
        SbomError: a lock file is not complete.
    """
    page = page_parts(json.loads((ROOT / PAGE_LOCK).read_text()))
    package = Part(
        "rlrun", version(), f"pkg:pypi/rlrun@{version()}", (), "Built from the sources in the image's build."
    )
    made = {}
    for image in IMAGES:
        text, is_role = (ROOT / f"Dockerfile.{image}").read_text(), image != "operator"
        locks = image_locks(text, accelerator, DEVEL if devel and is_role else None)
        locked = locked_in_order(locks)
        given = CPU_ARGUMENTS["SYSTEM_PACKAGES"] if accelerator == "cpu" and is_role else None
        system = system_parts(text, base_name(Wanted(None, "", accelerator, None), image), given)
        contained = [*base_parts(bases or {}, image), *system, package, *locked, *page]
        made[f"rlrun-{image}"] = document(image_subject(image, values), contained, [], created)
    return made


def commit_time() -> datetime:
    """Return the time of this commit, or the present time outside of a checkout."""
    done = subprocess.run(["git", "log", "-1", "--format=%ct"], cwd=ROOT, capture_output=True, text=True)
    return datetime.fromtimestamp(int(done.stdout), UTC) if done.stdout.strip() else datetime.now(UTC)


def main(argv: Sequence[str] | None = None) -> int:
    """Write the documents; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.sbom", description="Write SPDX documents of images and wheel."
    )
    parser.add_argument("--output-dir", type=Path, required=True, metavar="DIR")
    parser.add_argument("--accelerator", choices=("gpu", "cpu"), default="gpu", help="of the images (default: gpu)")
    parser.add_argument(
        "--devel", action="store_true", help="trainer and engine of the target devel, with a CUDA compiler"
    )
    parser.add_argument("--values", type=Path, metavar="FILE", help="images.yaml: the digests of the images")
    parser.add_argument("--bases", type=Path, metavar="FILE", help="base-images.json: the digests of their bases")
    parser.add_argument("--wheel", type=Path, metavar="FILE", help="write the document of this wheel instead")
    options = parser.parse_args(argv)
    try:
        if options.wheel:
            subject, needed = wheel_parts(options.wheel)
            page = page_parts(json.loads((ROOT / PAGE_LOCK).read_text()))
            made = {options.wheel.name: document(subject, page, needed, commit_time())}
        else:
            values = options.values.read_text() if options.values else ""
            bases = json.loads(options.bases.read_text())["images"] if options.bases else None
            made = documents(options.accelerator, commit_time(), values=values, bases=bases, devel=options.devel)
        options.output_dir.mkdir(parents=True, exist_ok=True)
        for name, content in made.items():
            written = options.output_dir / f"{name}.spdx.json"
            written.write_text(json.dumps(content, indent=1) + "\n")
            print(f"{written}: {len(content['packages']) - 1} packages")
    except SbomError as error:
        print(f"tools.sbom: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"tools.sbom: {error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
