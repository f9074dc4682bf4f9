"""The two packs of a complete run on a GPU machine without a network: `python -m benchmarks.gpu.pack_run fetch|pack|check`.

`fetch` downloads the wheels that the packs need, and verifies them by the hashes of requirements/gpu.txt. `pack` writes
`.gpu/run1` (vLLM, with the GPU code of one architecture) and `.gpu/run2` (wheels of other packages and of RLRun), each
with its SHA-256 sums, and checks their sizes. `check` compares the sums of a pack, and extracts its archive.
"""

from __future__ import annotations

import argparse
import errno
import hashlib
import io
import lzma
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from benchmarks.gpu import zero_fatbin
from benchmarks.gpu.pack_wheels import (
    LOCK,
    PACKAGES,
    ROOT,
    PackError,
    check_space,
    digest_file,
    download_wheels,
    fetch_wheels,
    locked_lines,
)
from benchmarks.gpu.zero_fatbin import zero_other_architectures

PACK_LIMIT, UPLOAD_LIMIT = 46_000_000, 64 * 2**20
"""Bytes of one pack, and of a pack together with the checkout."""
SUMS, ARCHIVE = "SHA256SUMS", "vllm.tar.xz"
LIBRARIES = ("_C_stable_libtorch", "vllm_flash_attn/_vllm_fa3_C", "cumem_allocator", "spinloop")
"""Libraries of vLLM for a dense model in bfloat16 on Hopper. It imports all others with a guard."""
FIRST = ("annotated-types", "loguru", "msgspec", "pydantic", "pydantic-core", "typing-inspection")
"""Packages of the first pack: RLRun's process groups, which the check of NCCL uses, need them."""
_OMITTED = re.compile(
    r"vllm/(third_party/(deep_gemm|fmha_sm100)/|vllm-rs$|.*\.(so|h|hpp|cuh|cu|cpp|inl|jpg)$)|.*/RECORD$"
)
_DICTIONARY_BYTES = 64 * 2**20
"""Window of the compressor: copies of one kernel stand further apart than the 8 MiB of a smaller one."""


def vllm_files(wheel: Path) -> Iterator[tuple[str, bytes]]:
    """Yield name and content of the files of vLLM's wheel that a pack holds, libraries last."""
    kept = [f"vllm/{name}.abi3.so" for name in LIBRARIES]
    with zipfile.ZipFile(wheel) as opened:
        for name in sorted(opened.namelist()):
            if not name.endswith("/") and not _OMITTED.match(name):
                yield name, opened.read(name)
        for name in kept:
            data, code = zero_other_architectures(opened.read(name))
            print(f"{name}: {len(data):,} bytes, {code:,} of them kept GPU code", file=sys.stderr)
            yield name, data


def write_archive(path: Path, files: Iterable[tuple[str, bytes]]) -> None:
    """Write an archive with the same bytes for the same files."""
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": _DICTIONARY_BYTES}]
    with lzma.open(path, "wb", filters=filters) as stream, tarfile.open(fileobj=stream, mode="w") as target:
        for name, data in files:
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(data), 0o644
            target.addfile(member, io.BytesIO(data))


def write_sums(folder: Path) -> None:
    """Write the SHA-256 sums of all files of a pack."""
    lines = [f"{digest_file(file)}  {file.name}\n" for file in sorted(folder.iterdir()) if file.name != SUMS]
    (folder / SUMS).write_text("".join(lines))


def check_sums(folder: Path) -> int:
    """Compare the files of a pack with its sums and return their bytes.

    Raises:
        PackError: a file is missing, damaged or not listed.
    """
    fix = "run benchmarks/gpu/pack_run.sh again"
    try:
        listed = {
            name: value for value, name in (line.split("  ", 1) for line in (folder / SUMS).read_text().splitlines())
        }
    except (OSError, ValueError) as error:
        raise PackError(f"{folder / SUMS} cannot be read ({error}); {fix}") from None
    present = {file.name: file for file in folder.iterdir() if file.name != SUMS}
    if different := sorted(present.keys() ^ listed.keys()):
        raise PackError(f"{folder / different[0]} is {'not listed' if different[0] in present else 'missing'}; {fix}")
    for name, file in sorted(present.items()):
        if digest_file(file) != listed[name]:
            raise PackError(f"{file} has another SHA-256 sum than {SUMS}; {fix}")
    return sum(file.stat().st_size for file in folder.iterdir())


def checkout_bytes(root: Path = ROOT) -> int:
    """Return the bytes of all tracked files."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=root, check=True, capture_output=True, text=True).stdout
    return sum(path.lstat().st_size for name in names.split("\0") if name and (path := root / name).exists())


def check_sizes(packs: Mapping[str, int], checkout: int) -> None:
    """Check the bytes of each pack, alone and together with the checkout.

    Raises:
        PackError: a pack is too large.
    """
    for name, size in packs.items():
        if size > PACK_LIMIT:
            raise PackError(
                f"{name} has {size:,} bytes, and {PACK_LIMIT:,} are allowed; move a package to the other pack"
            )
        if size + checkout > UPLOAD_LIMIT:
            raise PackError(
                f"{name} and the checkout have {size + checkout:,} bytes, and {UPLOAD_LIMIT:,} are allowed; remove a package"
            )


def make_archive(wheel: Path, cache: Path) -> Path:
    """Return vLLM's archive from the cache, and make it first if the wheel or these programs have changed.

    Args:
        wheel: wheel of vLLM.
        cache: folder of archives.
    """
    programs = (Path(__file__), Path(zero_fatbin.__file__))
    key = hashlib.sha256("".join(map(digest_file, (wheel, *programs))).encode()).hexdigest()[:16]
    archive = cache / f"vllm-{key}.tar.xz"
    if not archive.exists():
        cache.mkdir(parents=True, exist_ok=True)
        for old in cache.glob("vllm-*.tar.xz*"):
            old.unlink()
        new = archive.with_suffix(".new")
        print(f"compressing {wheel.name}: 2 to 6 minutes", file=sys.stderr, flush=True)
        write_archive(new, vllm_files(wheel))
        new.replace(archive)
    return archive


def make_packs(wheels: Path, target: Path) -> None:
    """Write both packs from downloaded wheels.

    Args:
        wheels: folder with one wheel of vLLM, of each package, and of RLRun. The archive is kept next to it.
        target: folder of the packs, `.gpu`.

    Raises:
        PackError: a pack is too large, or a wheel is missing.
    """
    found = sorted(wheels.glob("*.whl"))
    engine = [wheel for wheel in found if wheel.name.startswith("vllm-")]
    own = [wheel for wheel in found if wheel.name.startswith("rlrun-")]
    if len(engine) != 1 or len(own) != 1 or len(found) != len(set(PACKAGES)) + 2:
        raise PackError(
            f"{wheels} has {len(found)} wheels, expected vllm, rlrun and {len(set(PACKAGES))} others; delete the folder, and "
            "run benchmarks/gpu/pack_run.sh again"
        )
    archive = make_archive(engine[0], wheels.parent / "archive")
    sizes = {}
    for name in ("run1", "run2"):
        # The sums are written last: a pack without them is incomplete, and is refused.
        shutil.rmtree(target / name, ignore_errors=True)
        (target / name).mkdir(parents=True)
    shutil.copy(archive, target / "run1" / ARCHIVE)
    for wheel in found:
        if wheel != engine[0]:
            is_first = wheel.name.split("-")[0].replace("_", "-") in FIRST
            shutil.copy(wheel, target / ("run1" if is_first else "run2"))
    for name in ("run1", "run2"):
        write_sums(target / name)
        sizes[name] = check_sums(target / name)
    checkout = checkout_bytes()
    check_sizes(sizes, checkout)
    for name, size in sizes.items():
        print(f"{target / name}: {size:,} bytes, {size + checkout:,} of {UPLOAD_LIMIT:,} with the checkout")


def unpack(archive: Path, site: Path) -> None:
    """Extract vLLM's archive into a folder of PYTHONPATH."""
    with tarfile.open(archive) as opened:
        opened.extractall(site, filter="data")


def main() -> int:
    """Run one command and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    fetch = commands.add_parser("fetch", help="download missing wheels, and verify all of them")
    fetch.add_argument("wheels", type=Path)
    pack = commands.add_parser("pack", help="write both packs")
    pack.add_argument("wheels", type=Path)
    pack.add_argument("target", type=Path)
    check = commands.add_parser("check", help="compare the sums of a pack, and extract its archive")
    check.add_argument("pack", type=Path)
    check.add_argument("--site", type=Path, help="folder for vLLM's files")
    space = commands.add_parser("space", help="check the free space of a folder")
    space.add_argument("folder", type=Path)
    space.add_argument("gigabytes", type=float)
    options = parser.parse_args()
    try:
        if options.command == "fetch":
            fetch_wheels(options.wheels, locked_lines(LOCK.read_text(), ("vllm", *PACKAGES)), download_wheels)
        elif options.command == "pack":
            make_packs(options.wheels, options.target)
        elif options.command == "space":
            check_space(options.folder, int(options.gigabytes * 1e9))
        else:
            print(f"{options.pack}: {check_sums(options.pack):,} bytes, all sums fit", flush=True)
            if options.site is not None and (options.pack / ARCHIVE).exists():
                unpack(options.pack / ARCHIVE, options.site)
    except PackError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        file = error.filename2 or error.filename
        place = f"{file}: " if file else ""
        fix = (
            "free disk space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "check the folder and its permissions"
        )
        print(f"error: {place}{error.strerror}; {fix}, and run the command again", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
