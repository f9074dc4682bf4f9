"""Base images by digest: what a Dockerfile begins with, and what a registry calls it today. Pure but for what is passed in."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

SCANNER = "docker/buildkit-syft-scanner:stable-1"
"""What buildx lists the packages of an image with; it runs on the image's files while they are built."""
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True)
class Base:
    """An image that a build starts from, and the digest that the registry gave for its tag."""

    name: str
    digest: str

    @property
    def pinned(self) -> str:
        """The reference by digest alone, which docker and buildah both accept."""
        return f"{_without_tag(self.name)}@{self.digest}"

    @property
    def full_name(self) -> str:
        """The reference with registry and tag, as `org.opencontainers.image.base.name` asks for it."""
        first, slash, _ = self.name.partition("/")
        if not slash:
            name = f"docker.io/library/{self.name}"
        elif "." in first or ":" in first or first == "localhost":
            name = self.name
        else:
            name = f"docker.io/{self.name}"
        return name if _without_tag(name) != name else f"{name}:latest"

    def labels(self) -> dict[str, str]:
        """Labels of what is built from it."""
        return {
            "org.opencontainers.image.base.name": self.full_name,
            "org.opencontainers.image.base.digest": self.digest,
        }

    def recorded(self) -> dict[str, str]:
        """The entry of base-images.json."""
        return {"name": self.full_name, "digest": self.digest}


def default_base(dockerfile: str) -> str:
    """What a Dockerfile begins with unless BASE_IMAGE is given.

    Raises:
        ValueError: it has no such argument.
    """
    found = re.search(r"^ARG BASE_IMAGE=(\S+)$", dockerfile, re.MULTILINE)
    if found is None:
        raise ValueError("the Dockerfile has no line ARG BASE_IMAGE=NAME")
    return found[1]


def inspect_command(name: str) -> list[str]:
    """The command that asks a registry for an image's manifest, without its layers."""
    return ["docker", "buildx", "imagetools", "inspect", "--format", "{{json .Manifest}}", name]


def manifest_digest(name: str, printed: str) -> str:
    """The digest in the output of `inspect_command`, or in buildx's metadata file.

    Raises:
        ValueError: there is none.
    """
    try:
        content = json.loads(printed)
        digest = content.get("digest") or content.get("containerimage.digest")
    except (ValueError, AttributeError):
        digest = None
    if not isinstance(digest, str) or _DIGEST.fullmatch(digest) is None:
        raise ValueError(f"buildx gave no digest of {name}")
    return digest


def attested_command(build: list[str], scanner: Base, metadata: str) -> list[str]:
    """A `docker build` as the build of a release: pushed, with provenance and an SBOM beside it, its digest in a file.

    Args:
        build: `docker build ...`.
        scanner: what lists the packages.
        metadata: the file that gets the digest.
    """
    attestations = ["--provenance=mode=max", f"--sbom=generator={scanner.pinned}"]
    return ["docker", "buildx", "build", "--push", *attestations, "--metadata-file", metadata, *build[2:]]


def _without_tag(name: str) -> str:
    folder, slash, last = name.rpartition("/")
    return folder + slash + last.partition(":")[0]
