"""Base images by digest: the default base of a Dockerfile, and its present digest in a registry. Pure."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

SCANNER = "docker/buildkit-syft-scanner:stable-1"
"""Image with which buildx lists the packages of an image; it runs on the image's files during the build."""
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True)
class Base:
    """Base image of a build, and the digest that the registry returned for its tag."""

    name: str
    digest: str

    @property
    def pinned(self) -> str:
        """Reference by digest only, which docker and buildah both accept."""
        return f"{_without_tag(self.name)}@{self.digest}"

    @property
    def full_name(self) -> str:
        """Reference with registry and tag, as `org.opencontainers.image.base.name` requires."""
        first, slash, _ = self.name.partition("/")
        if not slash:
            name = f"docker.io/library/{self.name}"
        elif "." in first or ":" in first or first == "localhost":
            name = self.name
        else:
            name = f"docker.io/{self.name}"
        return name if _without_tag(name) != name else f"{name}:latest"

    def labels(self) -> dict[str, str]:
        """Return labels of images with this base."""
        return {
            "org.opencontainers.image.base.name": self.full_name,
            "org.opencontainers.image.base.digest": self.digest,
        }

    def recorded(self) -> dict[str, str]:
        """Return the entry of base-images.json."""
        return {"name": self.full_name, "digest": self.digest}


def default_base(dockerfile: str) -> str:
    """Return the default base image of a Dockerfile, its BASE_IMAGE.

    Raises:
        ValueError: it has no such argument.
    """
    found = re.search(r"^ARG BASE_IMAGE=(\S+)$", dockerfile, re.MULTILINE)
    if found is None:
        raise ValueError("the Dockerfile lacks the line ARG BASE_IMAGE=NAME")
    return found[1]


def inspect_command(name: str) -> list[str]:
    """Return the command that reads an image's manifest from a registry, without its layers."""
    return ["docker", "buildx", "imagetools", "inspect", "--format", "{{json .Manifest}}", name]


def raw_manifest_command(reference: str) -> list[str]:
    """Return the command that reads the bytes of a manifest, or of an index of manifests, from a registry."""
    return ["docker", "buildx", "imagetools", "inspect", "--raw", reference]


def manifest_digest(name: str, printed: str) -> str:
    """Return the digest in the output of `inspect_command`, or in buildx's metadata file.

    Raises:
        ValueError: the text has no digest.
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
    """Return the `docker build` of a release: pushed, with provenance and an SBOM, and with its digest in a file.

    Args:
        build: `docker build ...`.
        scanner: image that lists the packages.
        metadata: file for the digest.
    """
    attestations = ["--provenance=mode=max", f"--sbom=generator={scanner.pinned}"]
    return ["docker", "buildx", "build", "--push", *attestations, "--metadata-file", metadata, *build[2:]]


def _without_tag(name: str) -> str:
    folder, slash, last = name.rpartition("/")
    return folder + slash + last.partition(":")[0]
