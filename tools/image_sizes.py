"""Layers of a built image and their sizes, from docker, buildah or the manifest in a registry. Pure, except `read_layers`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SHOWN_BYTES = 1_000_000
"""Layers below this size are one line of the table."""
_ARGUMENTS = re.compile(r"^\|\d+ .*?(?=/bin/sh -c )")
_LOCK = re.compile(r"--requirement /opt/requirements/([\w.-]+)\.txt")
_COPIES = {"/opt/rlrun/lib": "packages of flash-attention-3.txt", "/opt/requirements/dist": "wheel of rlrun"}
"""Layers that copy the result of another stage, by folder."""


@dataclass(frozen=True)
class Layer:
    """A layer of an image, in the order in which a container mounts it."""

    size: int
    """Bytes: unpacked, or compressed if a registry reports them."""
    step: str
    """Step of the Dockerfile that made it, or an empty text if unknown."""


def docker_command(reference: str) -> list[str]:
    """Return the command that lists the layers of an image that docker has."""
    return ["docker", "history", "--no-trunc", "--human=false", "--format", "{{json .}}", reference]


def docker_layers(printed: str) -> list[Layer]:
    """Return layers from the output of `docker_command`, the base first.

    Raises:
        ValueError: the output is not that of docker.
    """
    try:
        entries = [json.loads(line) for line in printed.splitlines() if line.strip()]
        layers = [Layer(int(entry["Size"]), entry["CreatedBy"]) for entry in reversed(entries)]
    except (KeyError, TypeError, ValueError):
        layers = []
    if not layers:
        raise ValueError("docker history reported no layers")
    return layers


def buildah_layers(image: Mapping[str, Any], stored: Sequence[Mapping[str, Any]]) -> list[Layer]:
    """Return layers of an image that buildah has, the base first.

    Args:
        image: `buildah inspect --type image`.
        stored: content of `layers.json` in the folder of buildah's storage.

    Raises:
        ValueError: a layer is not in the storage.
    """
    try:
        sizes = {layer["diff-digest"]: int(layer["diff-size"]) for layer in stored if "diff-digest" in layer}
        digests = iter(image["OCIv1"]["rootfs"]["diff_ids"])
        steps = [step.get("created_by", "") for step in image["OCIv1"]["history"] if not step.get("empty_layer")]
        return [Layer(sizes[next(digests)], step) for step in steps]
    except (KeyError, TypeError, StopIteration) as error:
        raise ValueError(f"buildah's storage lacks a layer ({error!r})") from None


def manifest_layers(manifest: Mapping[str, Any]) -> list[Layer]:
    """Return compressed layers from an image's manifest in a registry.

    Raises:
        ValueError: it is not the manifest of an image.
    """
    try:
        return [Layer(int(layer["size"]), "") for layer in manifest["layers"]]
    except (KeyError, TypeError) as error:
        raise ValueError(f"the manifest lists no layers ({error!r})") from None


def image_digest(index: Mapping[str, Any]) -> str | None:
    """Return the digest of the first image in an index, or None if `index` is the manifest of an image.

    Attestations in an index have the platform `unknown`.
    """
    for entry in index.get("manifests", ()):
        if entry.get("platform", {}).get("os") != "unknown":
            return str(entry["digest"])
    return None


def read_layers(program: str, reference: str, output: Callable[[Sequence[str]], str]) -> list[Layer]:
    """Return the layers of an image that was built on this machine.

    Args:
        program: docker or buildah.
        reference: the image's reference.
        output: function that runs a command and returns its output.

    Raises:
        ValueError: the program does not report the layers.
        OSError: the storage of buildah cannot be read.
    """
    if program == "docker":
        return docker_layers(output(docker_command(reference)))
    image = json.loads(output([program, "inspect", "--type", "image", reference]) or "{}")
    store = json.loads(output([program, "info"]) or "{}").get("store", {})
    folder = Path(store.get("GraphRoot", "")) / f"{store.get('GraphDriverName', '')}-layers"
    return buildah_layers(image, json.loads((folder / "layers.json").read_text()))


def short_step(step: str) -> str:
    """Return a step of a Dockerfile in a few words: the lock file that it installs, or its beginning."""
    if lock := _LOCK.search(step):
        return f"packages of {lock[1]}.txt"
    if "--no-index" in step and "/opt/requirements/dist" in step:
        return "rlrun"
    for folder, name in _COPIES.items():
        if re.search(rf"\bCOPY .*{folder}\b", step):
            return name
    if "apt-get install" in step:
        return "system packages"
    if "python3 -m venv" in step:
        return "user 1000 and the virtual environment"
    words = _ARGUMENTS.sub("", step).removeprefix("/bin/sh -c ").removeprefix("#(nop) ").strip()
    return words[:60] or "base"


def size_lines(name: str, layers: Iterable[Layer], *, compressed: bool = False) -> list[str]:
    """Return lines for a terminal: the sum, then each layer of at least 1 MB."""
    layers = list(layers)
    kind = "compressed" if compressed else "unpacked"
    small = sum(layer.size for layer in layers if layer.size < SHOWN_BYTES)
    lines = [f"{name}: {sum(layer.size for layer in layers) / 1e9:.2f} GB {kind}"]
    for number, layer in enumerate(layers):
        if layer.size >= SHOWN_BYTES:
            step = "base" if number == 0 else short_step(layer.step)
            lines.append(f"  {layer.size / 1e6:>8,.1f} MB  {step}")
    return [*lines, *([f"  {small / 1e6:>8,.1f} MB  smaller layers"] if small else [])]
