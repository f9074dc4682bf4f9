"""Wheels of the packs: the locked packages that a GPU machine lacks, downloaded by hash and verified before each use."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]
LOCK = ROOT / "requirements" / "gpu.txt"
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
WHEEL_BYTES = 800_000_000
"""Free bytes for a download of all wheels, 386 MB, which pip holds twice."""
_PARTIAL = "partial-"
_PLATFORMS = (
    *(f"manylinux_2_{minor}" for minor in (17, 24, 26, 27, 28, 31, 34, 35)),
    *("manylinux2014", "manylinux1"),
)
_UNREACHABLE = re.compile(
    r"NewConnectionError|ConnectTimeout|NameResolution|Max retries exceeded|ProxyError|ReadTimeout"
)
_PIN = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)==\S+ \\\n(?:    --hash=\S+(?: \\)?\n)+", re.MULTILINE)


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


def digest_file(file: Path) -> str:
    """Return the SHA-256 sum of a file in hexadecimal."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def check_space(folder: Path, size: int) -> None:
    """Check the free bytes of a folder's volume before a download, which would otherwise fail in the middle.

    Raises:
        PackError: the volume is too full.
    """
    free = shutil.disk_usage(folder).free
    if free < size:
        raise PackError(
            f"{folder} has {free / 1e9:.1f} GB of free space, and {size / 1e9:.1f} GB are needed; delete files, or set "
            "RLRUN_GPU_PACKS to a folder on another volume"
        )


def delete_unlocked(wheels: Path, lock: str) -> list[str]:
    """Delete wheels that the lock does not have: of other versions, damaged ones and parts of downloads.

    Args:
        wheels: folder of the wheels.
        lock: locked packages with their hashes, of `locked_lines`.

    Returns:
        Names of the packages without a wheel.
    """
    hashes = {match["name"]: set(re.findall(r"sha256:([0-9a-f]{64})", match[0])) for match in _PIN.finditer(lock)}
    missing = set(hashes)
    for wheel in sorted(wheels.glob("*.whl")):
        name = wheel.name.split("-")[0].replace("_", "-").lower()
        if name == "rlrun":
            continue
        if name in missing and digest_file(wheel) in hashes[name]:
            missing.remove(name)
            continue
        state = "is damaged" if f"{name}==" in lock else "is not in the lock"
        print(f"{wheel.name} {state}, or has another version: deleted", file=sys.stderr)
        wheel.unlink()
    return sorted(missing)


def fetch_wheels(wheels: Path, lock: str, download: Callable[[Path, Path], None]) -> None:
    """Download the wheels that a folder lacks, and verify all of them.

    Args:
        wheels: folder of the wheels.
        lock: locked packages with their hashes.
        download: function that downloads the packages of a file with locked lines into a folder.

    Raises:
        PackError: the volume is too full, the download failed, or a wheel is damaged.
    """
    wheels.mkdir(parents=True, exist_ok=True)
    for folder in wheels.glob(f"{_PARTIAL}*"):  # of a download that was killed
        shutil.rmtree(folder)
    missing = delete_unlocked(wheels, lock)
    if not missing:
        return
    check_space(wheels, WHEEL_BYTES)
    print(f"downloading {len(missing)} of {len(_PIN.findall(lock))} wheels to {wheels}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(dir=wheels, prefix=_PARTIAL) as new:
        folder = Path(new)
        wanted = folder / "lock.txt"
        wanted.write_text(locked_lines(lock, missing))
        download(wanted, folder)
        for wheel in folder.glob("*.whl"):
            wheel.replace(wheels / wheel.name)
    if missing := delete_unlocked(wheels, lock):
        raise PackError(
            f"{wheels} has no wheel of {missing[0]} after the download; run benchmarks/gpu/pack_run.sh again"
        )


def _describe(line: str) -> str:
    """Return the short cause in a warning of pip."""
    found = re.search(r"\[Errno [^'\"]+|ProxyError|ConnectTimeout|ReadTimeout", line)
    return found[0] if found is not None else line.strip()[-200:]


def download_wheels(lock: Path, target: Path) -> None:
    """Download wheels of Python 3.12 on x86-64 with pip.

    Raises:
        PackError: pip failed; the message contains its last error.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes", "--only-binary=:all:"]
    command += [
        "--python-version",
        "3.12",
        "--implementation",
        "cp",
        "--disable-pip-version-check",
        "--progress-bar=off",
    ]
    command += ["--quiet", "--retries", "2", *(f"--platform={name}_x86_64" for name in _PLATFORMS)]
    done = subprocess.run([*command, "-d", target, "-r", lock], capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        # pip reports an unreachable index as warnings, and then as a version that does not exist.
        cause = next((line for line in lines if _UNREACHABLE.search(line)), None)
        if cause is not None:
            raise PackError(
                f"the package index cannot be reached ({_describe(cause)}); run this where there is a network, or set "
                "PIP_INDEX_URL to a mirror. Wheels that are complete are kept"
            )
        errors = [line for line in lines if line.startswith("ERROR")] or lines[-1:] or [f"exit code {done.returncode}"]
        raise PackError(f"pip cannot download the wheels: {errors[-1].removeprefix('ERROR: ')[:500]}")
