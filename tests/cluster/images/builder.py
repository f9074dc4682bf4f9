"""Builder of image archives from this checkout: builds missing ones, deletes old ones."""

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.cache import cache_root, locked
from tests.cluster.errors import ClusterError
from tests.cluster.progress import Progress, duration

from .engines import Engine, choose, docker_works
from .inputs import File, Ignore, arguments, copied, files, key, parse, read, write

ROOT = Path(__file__).resolve().parents[3]
IMAGES = ("trainer", "inference", "operator", "stub")
CPU_ARGUMENTS = {"ACCELERATOR": "cpu"}
KEPT = 2
"""Number of archives kept for each image: the present one and its predecessor."""


@dataclass(frozen=True)
class BuiltImage:
    """An existing image.

    Attributes:
        name: one of `IMAGES`.
        reference: its reference in a manifest.
        archive: archive in docker's format; a changed image has another path.
    """

    name: str
    reference: str
    archive: Path


@dataclass(frozen=True)
class Plan:
    """Inputs of a build, computed without building."""

    image: BuiltImage
    values: Mapping[str, str]
    content: Mapping[str, File]


def plan(name: str, base: Mapping[str, str], *, root: Path, archives: Path) -> Plan:
    """Compute the key of the image that the checkout at `root` gives.

    Args:
        base: the build arguments of the base image.

    Raises:
        ClusterError: the image is unknown, or a required file is missing.
    """
    dockerfile = root / f"Dockerfile.{name}"
    if not dockerfile.exists():
        raise ClusterError(f"unknown image {name!r}; there are {', '.join(IMAGES)}")
    text = dockerfile.read_text()
    instructions = parse(text)
    taken = arguments(instructions)
    values = {argument: value for argument, value in {**base, **CPU_ARGUMENTS}.items() if argument in taken}
    try:
        names = files(root, copied(instructions, values), Ignore((root / ".dockerignore").read_text()))
    except FileNotFoundError as error:
        raise ClusterError(f"{dockerfile.name}: {error}") from None
    content = {**read(root, names), "Dockerfile": File(text.encode(), executable=False)}
    tag = key(values, content)
    return Plan(BuiltImage(name, f"localhost/rlrun-{name}:{tag}", archives / f"{name}-{tag}.tar"), values, content)


def build(names: Sequence[str] = IMAGES, *, progress: Progress | None = None) -> dict[str, BuiltImage]:
    """Build the missing images as CPU images, in the same way as users of the product.

    Args:
        names: some of `IMAGES`.
        progress: printer of a line per image, and of lines about long builds; standard output by default.

    Raises:
        ClusterError: no program to build with, or a build failed.
    """
    progress = progress or Progress()
    archives = cache_root() / "images"
    archives.mkdir(parents=True, exist_ok=True)
    with locked("images", waiting=progress.step("images: wait for another process that builds some")):
        for folder in archives.glob("context-*"):  # remains of a killed build
            shutil.rmtree(folder)
        for unfinished in archives.glob("*.tmp"):
            unfinished.unlink()
        engine = choose(docker_works, progress)
        return build_with(engine, names, root=ROOT, archives=archives, progress=progress)


def build_with(
    engine: Engine, names: Sequence[str], *, root: Path, archives: Path, progress: Progress
) -> dict[str, BuiltImage]:
    """Build with a given engine, checkout and folder of archives, as `build` does."""
    plans = [plan(name, engine.base(), root=root, archives=archives) for name in names]
    missing = [each for each in plans if not each.image.archive.exists()]
    if missing:
        engine.prepare()
    for each in missing:
        began = progress.seconds
        _make(engine, each, archives)
        size = each.image.archive.stat().st_size / 1e6
        progress(f"image {each.image.reference} built in {duration(progress.seconds - began)}, {size:.0f} MB")
    for each in plans:
        each.image.archive.touch()  # the newest ones are kept
        _forget_old(engine, each.image)
    return {each.image.name: each.image for each in plans}


def _make(engine: Engine, wanted: Plan, archives: Path) -> None:
    image = wanted.image
    log = archives / f"{image.name}.log"
    log.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="context-", dir=archives) as folder:
        write(wanted.content, Path(folder))
        engine.build(Path(folder), image.reference, wanted.values, log)
    unfinished = image.archive.with_suffix(".tmp")
    unfinished.unlink(missing_ok=True)
    engine.save(image.reference, unfinished, log)
    unfinished.rename(image.archive)


def _forget_old(engine: Engine, image: BuiltImage) -> None:
    archives = sorted(image.archive.parent.glob(f"{image.name}-*.tar"), key=lambda file: file.stat().st_mtime)
    for old in archives[:-KEPT]:
        engine.remove(f"localhost/rlrun-{image.name}:{old.stem.removeprefix(f'{image.name}-')}")
        old.unlink()
