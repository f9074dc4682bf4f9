"""`python -m tools.images --registry REGISTRY`: build the three images, push them, and write the Helm values that name them.

Needs Python, and docker or buildah; nothing of this project is installed for it.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
IMAGES = ("trainer", "inference", "operator")
CPU_ARGUMENTS = {
    "BASE_IMAGE": "debian:bookworm-slim",
    "ACCELERATOR": "cpu",
    "SYSTEM_PACKAGES": "python3 python3-venv ca-certificates libnuma1",
}
"""Build arguments of trainer and engine for machines without a GPU; those of the Dockerfiles are for GPUs."""
KIND_TAG = "dev"
KIND_VARIABLES = {"BUILDX_NO_DEFAULT_ATTESTATIONS": "1"}
"""Variables of a build for kind: an image with a provenance attestation cannot be loaded there (kubernetes-sigs/kind#3795)."""
VALUES = "images.yaml"


class ImagesError(Exception):
    """A command failed, or there is none to call."""


@dataclass(frozen=True)
class Wanted:
    """What the command line asks for."""

    registry: str | None
    tag: str
    accelerator: str
    kind: str | None
    """Name of the kind cluster that gets the images instead of a registry."""

    def reference(self, image: str) -> str:
        """What a manifest calls an image."""
        return "/".join(filter(None, (self.registry, f"rlrun-{image}:{self.tag}")))


def version() -> str:
    """The release that this checkout is."""
    found = re.search(r'^version = "([^"]+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


def build_command(program: str, wanted: Wanted, image: str, revision: str) -> list[str]:
    """The command that builds an image from this checkout."""
    arguments = {"VERSION": version(), "REVISION": revision}
    if wanted.accelerator == "cpu" and image != "operator":
        arguments |= CPU_ARGUMENTS
    options = [word for name, value in arguments.items() for word in ("--build-arg", f"{name}={value}")]
    return [program, "build", "--file", f"Dockerfile.{image}", *options, "--tag", wanted.reference(image), "."]


def values_text(references: Mapping[str, str], *, local: bool) -> str:
    """Values of the chart rlrun-operator.

    Args:
        references: of each image, best with a digest.
        local: whether the nodes have the images already and no registry has.
    """
    lines = [
        "# Images of the chart rlrun-operator, as `python -m tools.images` built them: helm install ... --values images.yaml",
        f"image: {references['operator']}",
        "images:",
        f"  trainer: {references['trainer']}",
        f"  inference: {references['inference']}",
    ]
    return "\n".join([*lines, *(["imagePullPolicy: IfNotPresent"] if local else [])]) + "\n"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(prog="python -m tools.images", description="Build the images for a cluster.")
    where = p.add_mutually_exclusive_group(required=True)
    where.add_argument("--registry", metavar="REGISTRY", help="push them there: registry.example.com/team")
    where.add_argument("--kind", metavar="NAME", help="load them into this kind cluster instead")
    p.add_argument("--tag", help=f"their tag (default: the version; with --kind {KIND_TAG})")
    p.add_argument(
        "--accelerator",
        choices=("gpu", "cpu"),
        default="gpu",
        help="what trainer and engine compute with (default: gpu)",
    )
    p.add_argument(
        "--output",
        type=Path,
        default=Path(VALUES),
        metavar="FILE",
        help=f"the Helm values that name them (default: {VALUES})",
    )
    p.add_argument("--dry-run", action="store_true", help="print the commands instead")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Build, push or load, and write the values; returns the exit code."""
    options = parser().parse_args(argv)
    tag = options.tag or (KIND_TAG if options.kind else version())
    wanted = Wanted(options.registry, tag, options.accelerator, options.kind)
    try:
        references = make(wanted, dry_run=options.dry_run)
        if not options.dry_run:
            options.output.write_text(values_text(references, local=wanted.kind is not None))
    except ImagesError as error:
        print(f"tools.images: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"tools.images: {error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    if not options.dry_run:
        print(f"{options.output}: helm install rlrun-operator charts/rlrun-operator ... --values {options.output}")
    return 0


def make(wanted: Wanted, *, dry_run: bool = False) -> dict[str, str]:
    """Build every image and bring it to its place.

    Returns:
        What a manifest calls each, by digest where a registry has said it.

    Raises:
        ImagesError: a command failed, or a program is missing.
    """
    program = next((name for name in ("docker", "buildah") if shutil.which(name)), None)
    if program is None or (wanted.kind is not None and program != "docker"):
        raise ImagesError(
            "docker is not installed (with --registry buildah does as well); install it, or take a release's images"
        )
    if wanted.kind is not None and shutil.which("kind") is None:
        raise ImagesError("kind is not installed; install it, or push the images with --registry")
    revision = "unknown" if dry_run else _output(["git", "rev-parse", "HEAD"], otherwise="unknown")
    variables = KIND_VARIABLES if wanted.kind else {}
    for image in IMAGES:
        _run(build_command(program, wanted, image, revision), dry_run, variables)
    for image in IMAGES:
        reference = wanted.reference(image)
        bring = (
            ["kind", "load", "docker-image", "--name", wanted.kind, reference]
            if wanted.kind
            else [program, "push", reference]
        )
        _run(bring, dry_run)
    return {image: _by_digest(program, wanted, image, dry_run) for image in IMAGES}


def _by_digest(program: str, wanted: Wanted, image: str, dry_run: bool) -> str:
    """The reference with the digest that the registry gave it; without, where nothing says it."""
    reference = wanted.reference(image)
    if dry_run or wanted.kind is not None or program != "docker":
        return reference
    digests = _output(
        ["docker", "inspect", "--format", '{{join .RepoDigests "\\n"}}', reference], otherwise=""
    ).splitlines()
    here = f"{reference.rpartition(':')[0]}@"
    return next((digest for digest in digests if digest.startswith(here)), reference)


def _run(command: Sequence[str], dry_run: bool, variables: Mapping[str, str] | None = None) -> None:
    settings = "".join(f"{name}={value} " for name, value in (variables or {}).items())
    print(f"$ {settings}{shlex.join(command)}", flush=True)
    environment = {**os.environ, **(variables or {})}
    if not dry_run and subprocess.run(command, cwd=ROOT, env=environment).returncode != 0:
        raise ImagesError(f"{shlex.join(command[:2])} failed; its output is above")


def _output(command: Sequence[str], *, otherwise: str) -> str:
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return otherwise
    return done.stdout.strip() if done.returncode == 0 else otherwise


if __name__ == "__main__":
    sys.exit(main())
