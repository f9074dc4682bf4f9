"""`python -m tools.images --registry REGISTRY`: build the three images, push them, and write the Helm values that name them.

Needs Python, and docker or buildah; nothing of this project is installed for it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools import image_sizes
from tools.base_images import (
    SCANNER,
    Base,
    attested_command,
    default_base,
    inspect_command,
    manifest_digest,
    raw_manifest_command,
)

ROOT = Path(__file__).parents[1]
IMAGES = ("trainer", "inference", "operator")
CPU_ARGUMENTS = {
    "BASE_IMAGE": "debian:bookworm-slim",
    "ACCELERATOR": "cpu",
    "SYSTEM_PACKAGES": "python3 python3-venv ca-certificates libnuma1",
}
"""Build arguments of trainer and engine for machines without a GPU; the defaults of the Dockerfiles are for GPUs."""
DEVEL = "devel"
"""Target of the Dockerfiles of trainer and engine that also has a CUDA compiler."""
KIND_TAG = "dev"
KIND_VARIABLES = {"BUILDX_NO_DEFAULT_ATTESTATIONS": "1"}
"""Variables of a build for kind: an image with a provenance attestation cannot be loaded there (kubernetes-sigs/kind#3795)."""
VALUES = "images.yaml"
BASES = "base-images.json"


class ImagesError(Exception):
    """A command failed, or is not installed."""


@dataclass(frozen=True)
class Wanted:
    """Parsed command line."""

    registry: str | None
    tag: str
    accelerator: str
    kind: str | None
    """Name of the kind cluster that gets the images instead of a registry."""
    devel: bool = False
    """Whether trainer and engine have a CUDA compiler."""

    def reference(self, image: str) -> str:
        """Return the reference of an image in a manifest."""
        return "/".join(filter(None, (self.registry, f"rlrun-{image}:{self.tag}")))


def version() -> str:
    """Return the release of this checkout."""
    found = re.search(r'^version = "([^"]+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


def base_name(wanted: Wanted, image: str) -> str:
    """Return the base image of an image, by tag."""
    if wanted.accelerator == "cpu" and image != "operator":
        return CPU_ARGUMENTS["BASE_IMAGE"]
    return default_base((ROOT / f"Dockerfile.{image}").read_text())


def build_command(program: str, wanted: Wanted, image: str, revision: str, base: Base | None = None) -> list[str]:
    """Return the command that builds an image from this checkout, with a base by digest."""
    arguments = {"VERSION": version(), "REVISION": revision}
    if wanted.accelerator == "cpu" and image != "operator":
        arguments |= CPU_ARGUMENTS
    arguments |= {"BASE_IMAGE": base.pinned} if base else {}
    options = [word for name, value in arguments.items() for word in ("--build-arg", f"{name}={value}")]
    options += [
        word for name, value in (base.labels() if base else {}).items() for word in ("--label", f"{name}={value}")
    ]
    if wanted.devel and image != "operator":
        options += ["--target", DEVEL]
    return [program, "build", "--file", f"Dockerfile.{image}", *options, "--tag", wanted.reference(image), "."]


def values_text(references: Mapping[str, str], *, local: bool) -> str:
    """Return values of the chart rlrun-operator.

    Args:
        references: references of each image, best with a digest.
        local: whether the nodes have the images already, without a registry.
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
        help="device of trainer and engine (default: gpu)",
    )
    p.add_argument(
        "--output",
        type=Path,
        default=Path(VALUES),
        metavar="FILE",
        help=f"the Helm values that name them (default: {VALUES})",
    )
    p.add_argument(
        "--release",
        action="store_true",
        help=f"bases by digest ({BASES} names them), and buildx's provenance and SBOM for each image; needs --registry",
    )
    p.add_argument(
        "--devel",
        action="store_true",
        help="add a CUDA compiler to trainer and engine, for FlashInfer and fp8; the default tag then ends in -devel",
    )
    p.add_argument("--dry-run", action="store_true", help="print the commands instead")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Build, push or load, and write the values; return the exit code."""
    options = parser().parse_args(argv)
    if options.devel and options.accelerator == "cpu":
        parser().error(
            "--devel adds a CUDA compiler, which images for CPUs cannot use; leave out --devel or --accelerator cpu"
        )
    tag = options.tag or (KIND_TAG if options.kind else version()) + (f"-{DEVEL}" if options.devel else "")
    wanted = Wanted(options.registry, tag, options.accelerator, options.kind, options.devel)
    try:
        if options.release:
            references, bases = make_release(wanted, dry_run=options.dry_run)
            if not options.dry_run:
                options.output.with_name(BASES).write_text(json.dumps(bases, indent=2) + "\n")
        else:
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
    """Build and deliver every image.

    Returns:
        The reference of each image in a manifest, by digest if a registry has returned it.

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
    if not dry_run:
        for image in IMAGES:
            _print_sizes(program, wanted.reference(image))
    for image in IMAGES:
        reference = wanted.reference(image)
        bring = (
            ["kind", "load", "docker-image", "--name", wanted.kind, reference]
            if wanted.kind
            else [program, "push", reference]
        )
        _run(bring, dry_run)
    return {image: _by_digest(program, wanted, image, dry_run) for image in IMAGES}


def make_release(wanted: Wanted, *, dry_run: bool = False) -> tuple[dict[str, str], dict[str, object]]:
    """Build and push every image with attestations, from bases whose digests are requested once.

    Returns:
        The reference of each image by digest, and the content of base-images.json.

    Raises:
        ImagesError: a command failed, a digest is missing, or docker is.
    """
    if wanted.registry is None or shutil.which("docker") is None:
        raise ImagesError("--release needs docker with buildx, and --registry; for other images leave it out")
    revision = "unknown" if dry_run else _output(["git", "rev-parse", "HEAD"], otherwise="unknown")
    names = {image: base_name(wanted, image) for image in IMAGES}
    found = {name: Base(name, _manifest_digest(name, dry_run)) for name in dict.fromkeys([*names.values(), SCANNER])}
    references = {}
    with tempfile.TemporaryDirectory() as folder:
        for image in IMAGES:
            metadata = Path(folder) / f"{image}.json"
            build = build_command("docker", wanted, image, revision, found[names[image]])
            _run(attested_command(build, found[SCANNER], str(metadata)), dry_run)
            if not dry_run:
                digest = _checked_digest(wanted.reference(image), metadata.read_text() if metadata.exists() else "")
                references[image] = f"{wanted.reference(image).rpartition(':')[0]}@{digest}"
                _print_pushed_sizes(references[image])
    bases = {f"rlrun-{image}": found[name].recorded() for image, name in names.items()}
    return references, {"images": bases, "scanner": found[SCANNER].recorded()}


def _print_sizes(program: str, reference: str) -> None:
    """Print the layers of a built image. A failure is one line, because the image itself is good."""
    try:
        layers = image_sizes.read_layers(program, reference, lambda command: _output(command, otherwise=""))
        print("\n".join(image_sizes.size_lines(reference, layers)), flush=True)
    except (ValueError, OSError) as error:
        print(f"{reference}: sizes of the layers are unknown: {error}", file=sys.stderr, flush=True)


def _print_pushed_sizes(reference: str) -> None:
    """Print the compressed layers of a pushed image: buildx keeps no copy of it on this machine."""
    try:
        manifest = json.loads(_output(raw_manifest_command(reference), otherwise=""))
        if digest := image_sizes.image_digest(manifest):
            image = f"{reference.partition('@')[0]}@{digest}"
            manifest = json.loads(_output(raw_manifest_command(image), otherwise=""))
        layers = image_sizes.manifest_layers(manifest)
        print("\n".join(image_sizes.size_lines(reference, layers, compressed=True)), flush=True)
    except ValueError as error:
        print(f"{reference}: sizes of the layers are unknown: {error}", file=sys.stderr, flush=True)


def _manifest_digest(name: str, dry_run: bool) -> str:
    command = inspect_command(name)
    print(f"$ {shlex.join(command)}", flush=True)
    return "sha256:DIGEST" if dry_run else _checked_digest(name, _output(command, otherwise=""))


def _checked_digest(name: str, printed: str) -> str:
    try:
        return manifest_digest(name, printed)
    except ValueError as error:
        raise ImagesError(f"{error}; check that docker buildx is installed and reaches the registry") from None


def _by_digest(program: str, wanted: Wanted, image: str, dry_run: bool) -> str:
    """Return the reference with the registry's digest, or unchanged if the digest is unknown."""
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
