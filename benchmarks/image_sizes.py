"""Layers, sizes and contents of GPU images that were built on this machine.

    python -m benchmarks.image_sizes trainer=rlrun-trainer:0.1.0 inference=rlrun-inference:0.1.0 [--program buildah] [--write]

Each image is started once without a GPU, and `tools/gpu_image_check.py` runs in it: Triton compiles a kernel for Hopper,
torch.compile finds a C++ compiler, FlashAttention 4 is imported. `--compressed` also compresses every layer with gzip, as
a push to a registry does, and takes minutes. `--write` writes the tables to benchmarks/results/image_sizes.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.gpu_image_check import ROLES
from tools.image_sizes import SHOWN_BYTES, Layer, manifest_layers, read_layers, short_step

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results/image_sizes.md"
CHECK = ROOT / "tools/gpu_image_check.py"
MOUNTED = "/check.py"
LIMITS_GB = {"trainer": 6.0, "inference": 8.0}
"""Goals for the sizes of the unpacked images, in 10^9 bytes; the exit code is 1 above them."""
SHOWN_PACKAGES = 12


class MeasureError(Exception):
    """An image cannot be read or started."""


@dataclass(frozen=True)
class Measured:
    """One image."""

    role: str
    layers: Sequence[Layer]
    checks: Mapping[str, Mapping[str, Any]]
    """Result of each check by name: passed and text."""
    packages: Mapping[str, int]
    """Bytes of the largest Python packages by name, the largest first."""
    compressed: int | None = None
    """Bytes that a node without any layer pulls, or None if they were not measured."""

    @property
    def size(self) -> int:
        """Unpacked bytes."""
        return sum(layer.size for layer in self.layers)


def output_of(command: Sequence[str]) -> str:
    """Return the output of a command.

    Raises:
        MeasureError: it returned an error.
    """
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise MeasureError(f"{' '.join(command[:4])} failed: {done.stderr.strip()[-300:]}")
    return done.stdout


def run_check(program: str, reference: str, role: str, devel: bool) -> dict[str, Any]:
    """Run the checks in a container of the image and return their results.

    Raises:
        MeasureError: the container does not start, or prints no results.
    """
    command = ["python", MOUNTED, role, *(["--devel"] if devel else [])]
    mount = f"{CHECK}:{MOUNTED}:ro"
    if program == "docker":
        done = subprocess.run(
            ["docker", "run", "--rm", "--volume", mount, reference, *command], capture_output=True, text=True
        )
    else:
        container = output_of([program, "from", "--pull-never", reference]).strip()
        try:
            done = subprocess.run(
                [program, "run", "--volume", mount, container, "--", *command], capture_output=True, text=True
            )
        finally:
            output_of([program, "rm", container])
    try:
        results: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        raise MeasureError(f"{reference}: the checks printed no results: {done.stderr.strip()[-500:]}") from None
    return results


def compressed_size(reference: str) -> int:
    """Return the bytes of the layers of an image that buildah has, compressed with gzip.

    Raises:
        MeasureError: they cannot be written.
    """
    with tempfile.TemporaryDirectory() as folder:
        output_of(["buildah", "push", "--quiet", reference, f"oci:{folder}/image:measured"])
        blobs = Path(folder) / "image/blobs/sha256"
        index = json.loads((blobs.parents[1] / "index.json").read_text())
        manifest = json.loads((blobs / index["manifests"][0]["digest"].removeprefix("sha256:")).read_text())
        return sum(layer.size for layer in manifest_layers(manifest))


def measure_image(program: str, reference: str, role: str, devel: bool, compressed: bool = False) -> Measured:
    """Return layers, checks and packages of an image.

    Raises:
        MeasureError: it cannot be read or started.
    """
    try:
        layers = read_layers(program, reference, output_of)
    except (ValueError, OSError) as error:
        raise MeasureError(f"{reference}: {error}") from None
    results = run_check(program, reference, role, devel)
    size = compressed_size(reference) if compressed else None
    return Measured(role, layers, results["checks"], results["packages"], size)


def page_text(images: Sequence[Measured], note: str) -> str:
    """Return the page with all tables.

    Args:
        images: measured images.
        note: sentences about the machine and the base.
    """
    lines = ["# Sizes of the GPU images", "", note, ""]
    lines += ["| image | unpacked | goal | to pull | checks passed |", "|---|---|---|---|---|"]
    for image in images:
        passed = sum(result["passed"] for result in image.checks.values())
        pulled = "not measured" if image.compressed is None else f"{image.compressed / 1e9:.2f} GB"
        sizes = f"{image.size / 1e9:.2f} GB | {LIMITS_GB[image.role]:.0f} GB | {pulled}"
        lines.append(f"| {image.role} | {sizes} | {passed} of {len(image.checks)} |")
    for image in images:
        lines += ["", f"## {image.role}", "", "| layer | MB |", "|---|---|"]
        lines += [
            f"| {'base' if number == 0 else short_step(layer.step)} | {layer.size / 1e6:,.1f} |"
            for number, layer in enumerate(image.layers)
            if layer.size >= SHOWN_BYTES
        ]
        small = [layer.size for layer in image.layers if layer.size < SHOWN_BYTES]
        lines += [f"| {len(small)} smaller layers | {sum(small) / 1e6:,.1f} |", ""]
        lines += ["| check in a container without a GPU | passed | result |", "|---|---|---|"]
        lines += [
            f"| {name} | {'yes' if result['passed'] else '**no**'} | {result['text'].replace('|', '/')} |"
            for name, result in image.checks.items()
        ]
        lines += ["", "| largest packages | MB |", "|---|---|"]
        lines += [f"| {name} | {size / 1e6:,.0f} |" for name, size in list(image.packages.items())[:SHOWN_PACKAGES]]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the named images; return 1 if a check failed or an image is too large."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.image_sizes", description="Measure GPU images.")
    parser.add_argument("images", nargs="+", metavar="ROLE=REFERENCE")
    parser.add_argument("--program", choices=("docker", "buildah"), default="docker", help="default: docker")
    parser.add_argument("--devel", action="store_true", help="the images are of the target devel, with a CUDA compiler")
    parser.add_argument("--compressed", action="store_true", help="also compress the layers; needs --program buildah")
    parser.add_argument("--note", default="", help="sentences about the machine, for the page")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.relative_to(ROOT)}")
    options = parser.parse_args(argv)
    pairs = [image.partition("=")[::2] for image in options.images]
    if wrong := [role for role, reference in pairs if role not in ROLES or not reference]:
        parser.error(f"images: {wrong[0]!r} is not ROLE=REFERENCE with a role of {', '.join(ROLES)}")
    if options.compressed and options.program != "buildah":
        parser.error("--compressed needs --program buildah; docker compresses only for a registry")
    try:
        measured = [
            measure_image(options.program, reference, role, options.devel, options.compressed)
            for role, reference in pairs
        ]
    except MeasureError as error:
        print(f"image_sizes: {error}", file=sys.stderr)
        return 1
    text = page_text(measured, options.note)
    print(text)
    if options.write:
        RESULTS.write_text(text)
    good = all(result["passed"] for image in measured for result in image.checks.values())
    return 0 if good and all(image.size <= LIMITS_GB[image.role] * 1e9 for image in measured) else 1


if __name__ == "__main__":
    sys.exit(main())
