"""The two packs of a complete run on a GPU machine without a network: `python -m benchmarks.gpu.pack_run lock|pack|check`.

`lock` prints the part of requirements/gpu.txt that the packs need, with its hashes. `pack` writes `.gpu/run1` (vLLM, with
the GPU code of one architecture) and `.gpu/run2` (wheels of other packages and of RLRun), each with its SHA-256 sums, and
checks their sizes. `check` compares the sums of a pack.
"""

from __future__ import annotations

import argparse
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

from benchmarks.gpu.zero_fatbin import zero_other_architectures

ROOT = Path(__file__).parents[2]
LOCK = ROOT / "requirements" / "gpu.txt"
PACK_LIMIT, UPLOAD_LIMIT = 46_000_000, 64 * 2**20
"""Bytes of one pack, and of a pack together with the checkout."""
SUMS, ARCHIVE = "SHA256SUMS", "vllm.tar.xz"
PRESENT = ("numpy", "protobuf", "safetensors", "tokenizers", "torch", "transformers", "triton")
"""Packages that must not be in a pack: parts of two versions would mix with those of the machine."""

PACKAGES = (
    # Imported when the server and the engine start.
    *("annotated-types", "apache-tvm-ffi", "cachetools", "cbor2", "dill", "distro", "dnspython", "email-validator"),
    *("fastapi", "googleapis-common-protos", "httptools", "httpcore2", "httpx2", "jiter", "llguidance", "loguru"),
    *("msgspec", "openai", "openai-harmony", "oss-harmony", "opentelemetry-api", "opentelemetry-exporter-otlp"),
    *("opentelemetry-exporter-http-transport", "opentelemetry-exporter-otlp-common"),
    *("opentelemetry-exporter-otlp-proto-common", "opentelemetry-exporter-otlp-proto-grpc"),
    *("opentelemetry-exporter-otlp-proto-http", "opentelemetry-proto", "opentelemetry-sdk"),
    *("opentelemetry-semantic-conventions", "opentelemetry-semantic-conventions-ai", "partial-json-parser"),
    *("prometheus-fastapi-instrumentator", "pybase64", "pydantic", "pydantic-core", "pydantic-extra-types"),
    *("python-multipart", "pyzmq", "sniffio", "starlette", "truststore", "typing-inspection", "uvicorn"),
    *("watchfiles", "websockets", "xgrammar"),
    # Declared by vLLM, and imported later or never.
    *("anthropic", "astor", "blake3", "compressed-tensors", "depyf", "docstring-parser", "ijson", "interegular"),
    *("jmespath", "jsonschema", "jsonschema-specifications", "lark", "lm-format-enforcer", "mcp", "mcp-types"),
    *("mistral-common", "model-hosting-container-standards", "outlines-core", "pydantic-settings"),
    *("python-dotenv", "python-json-logger", "referencing", "rpds-py", "setproctitle", "sse-starlette", "supervisor"),
    # Imported by RLRun's command line.
    *("plotext",),
)
"""Packages that vLLM and RLRun need and the GPU machine lacks."""
LIBRARIES = ("_C_stable_libtorch", "vllm_flash_attn/_vllm_fa3_C", "cumem_allocator", "spinloop")
"""Libraries of vLLM for a dense model in bfloat16 on Hopper. It imports all others with a guard."""
FIRST = ("annotated-types", "loguru", "msgspec", "pydantic", "pydantic-core", "typing-inspection")
"""Packages of the first pack: RLRun's process groups, which the check of NCCL uses, need them."""
_OMITTED = re.compile(
    r"vllm/(third_party/(deep_gemm|fmha_sm100)/|vllm-rs$|.*\.(so|h|hpp|cuh|cu|cpp|inl|jpg)$)|.*/RECORD$"
)
_PIN = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)==\S+ \\\n(?:    --hash=\S+(?: \\)?\n)+", re.MULTILINE)
_DICTIONARY_BYTES = 64 * 2**20
"""Window of the compressor: copies of one kernel stand further apart than the 8 MiB of a smaller one."""


class PackError(ValueError):
    """Error for packs that cannot be used; the message contains the file and the fix."""


def locked_lines(text: str, names: Iterable[str]) -> str:
    """Return the lines of a lock, with hashes, for some packages.

    Raises:
        PackError: the lock has no such package, or the machine has it already.
    """
    pins = {match["name"]: match[0] for match in _PIN.finditer(text)}
    wanted = sorted(set(names))
    if wrong := [name for name in wanted if name in PRESENT]:
        raise PackError(f"{wrong[0]} must not be in a pack: the GPU machine has its own; remove it from PACKAGES")
    if missing := [name for name in wanted if name not in pins]:
        raise PackError(
            f"requirements/gpu.txt has no package {missing[0]}; remove it from PACKAGES, or run `make lock`"
        )
    return "".join(pins[name] for name in wanted)


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
    lines = [f"{_digest(file)}  {file.name}\n" for file in sorted(folder.iterdir()) if file.name != SUMS]
    (folder / SUMS).write_text("".join(lines))


def check_sums(folder: Path) -> int:
    """Compare the files of a pack with its sums and return their bytes.

    Raises:
        PackError: a file is missing, damaged or not listed.
    """
    fix = "run benchmarks/gpu/pack_run.sh again"
    try:
        listed = dict(reversed(line.split("  ", 1)) for line in (folder / SUMS).read_text().splitlines())
    except (OSError, ValueError) as error:
        raise PackError(f"{folder / SUMS} cannot be read ({error}); {fix}") from None
    present = {file.name: file for file in folder.iterdir() if file.name != SUMS}
    if different := sorted(present.keys() ^ listed.keys()):
        raise PackError(f"{folder / different[0]} is {'not listed' if different[0] in present else 'missing'}; {fix}")
    for name, file in sorted(present.items()):
        if _digest(file) != listed[name]:
            raise PackError(f"{file} has another SHA-256 sum than {SUMS}; {fix}")
    return sum(file.stat().st_size for file in folder.iterdir())


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


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


def make_packs(wheels: Path, target: Path) -> None:
    """Write both packs from downloaded wheels.

    Args:
        wheels: folder with one wheel of vLLM, of each package, and of RLRun.
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
    sizes = {}
    for name in ("run1", "run2"):
        shutil.rmtree(target / name, ignore_errors=True)
        (target / name).mkdir(parents=True)
    write_archive(target / "run1" / ARCHIVE, vllm_files(engine[0]))
    for wheel in found:
        if wheel != engine[0]:
            is_first = wheel.name.split("-")[0].replace("_", "-") in FIRST
            shutil.copy(wheel, target / ("run1" if is_first else "run2"))
    for name in ("run1", "run2"):
        write_sums(target / name)
        sizes[name] = check_sums(target / name)
    checkout = checkout_bytes()
    check_sizes(sizes, checkout)
    print(f"{sizes}, checkout {checkout:,} bytes")


def unpack(archive: Path, site: Path) -> None:
    """Extract vLLM's archive into a folder of PYTHONPATH."""
    with tarfile.open(archive) as opened:
        opened.extractall(site, filter="data")


def main() -> int:
    """Run one command and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("lock", help="print the locked packages with their hashes")
    pack = commands.add_parser("pack", help="write both packs")
    pack.add_argument("wheels", type=Path)
    pack.add_argument("target", type=Path)
    check = commands.add_parser("check", help="compare the sums of a pack, and extract its archive")
    check.add_argument("pack", type=Path)
    check.add_argument("--site", type=Path, help="folder for vLLM's files")
    options = parser.parse_args()
    try:
        if options.command == "lock":
            print(locked_lines(LOCK.read_text(), ("vllm", *PACKAGES)), end="")
        elif options.command == "pack":
            make_packs(options.wheels, options.target)
        else:
            print(f"{options.pack}: {check_sums(options.pack):,} bytes, all sums fit")
            if options.site is not None and (options.pack / ARCHIVE).exists():
                unpack(options.pack / ARCHIVE, options.site)
    except PackError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
