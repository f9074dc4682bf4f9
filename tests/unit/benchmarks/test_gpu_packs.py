"""Packs of the complete run on a GPU: zeros over code of other architectures, locked packages, sums and sizes."""

from __future__ import annotations

import hashlib
import struct
import subprocess
from pathlib import Path

import pytest

from benchmarks.gpu import pack_run, pack_wheels
from benchmarks.gpu.zero_fatbin import MACHINE_CODE, PTX, containers, find_section, zero_other_architectures

Entry = tuple[int, int, bytes]
"""Kind, architecture and payload."""


def make_container(*entries: Entry) -> bytes:
    body = b"".join(
        struct.pack("<HHIQ12xI", kind, 0x101, 32, len(payload), architecture) + payload
        for kind, architecture, payload in entries
    )
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def make_library(section: bytes) -> bytes:
    """Return an ELF file with the sections `.text`, `.nv_fatbin` and `.shstrtab`."""
    names = b"\0.text\0.nv_fatbin\0.shstrtab\0"
    text = b"\x90" * 24
    contents = [(0, b""), (1, text), (7, section), (18, names)]
    header_bytes, data, rows = 64, b"", b""
    for name, content in contents:
        rows += struct.pack("<IIQQQQIIQQ", name, 1, 0, 0, header_bytes + len(data), len(content), 0, 0, 8, 0)
        data += content + bytes(-len(content) % 8)
    table = header_bytes + len(data)
    header = (
        b"\x7fELF\x02\x01\x01" + bytes(9) + struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 0, table, 0, 64, 0, 0, 64, 4, 3)
    )
    return header + data + rows


ALL = make_container(
    (MACHINE_CODE, 80, b"a" * 40),
    (MACHINE_CODE, 90, b"hopper-1" * 4),
    (PTX, 90, b"p" * 16),
    (MACHINE_CODE, 100, b"c" * 8),
)
ONLY_PTX = make_container(
    (PTX, 80, b"old-text" * 2), (PTX, 89, b"new-text" * 2), (PTX, 100, b"x" * 24), (MACHINE_CODE, 80, b"d" * 8)
)
NEITHER = make_container((MACHINE_CODE, 120, b"blackwell-only--"))


def test_zeroing_keeps_code_of_one_architecture() -> None:
    library = make_library(ALL + bytes(24) + ONLY_PTX + NEITHER)
    changed, kept = zero_other_architectures(library)
    assert kept == 32 + 16
    found = [changed[entry.start : entry.stop] for entries in containers(changed) for entry in entries]
    assert found == [
        *(bytes(40), b"hopper-1" * 4, bytes(16), bytes(8)),
        *(bytes(16), b"new-text" * 2, bytes(24), bytes(8)),
        bytes(16),
    ]


def test_zeroing_changes_only_payloads() -> None:
    library = make_library(ALL + ONLY_PTX + NEITHER)
    changed, _ = zero_other_architectures(library)
    payloads = [(entry.start, entry.stop) for entries in containers(library) for entry in entries]
    position = 0
    for start, stop in [*payloads, (len(library), 0)]:
        assert changed[position:start] == library[position:start], "headers, sizes and other sections stay"
        position = stop
    assert len(changed) == len(library)


def test_library_without_gpu_code_stays_unchanged() -> None:
    library = make_library(b"").replace(b".nv_fatbin", b".something")
    assert find_section(library) == (0, 0)
    assert zero_other_architectures(library) == (library, 0)


@pytest.mark.parametrize(
    ("damaged", "message"),
    [
        (b"MZ" + bytes(80), "not a 64-bit little-endian ELF file"),
        (
            make_library(ALL.replace(struct.pack("<IHH", 0xBA55ED50, 1, 16), struct.pack("<IHH", 0xBA55ED50, 2, 16))),
            "version 2",
        ),
        (make_library(ALL[:-8]), "container at byte"),
        (make_library(make_container((7, 90, b"e" * 8))), "kind 7"),
    ],
)
def test_unknown_format_is_refused(damaged: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        zero_other_architectures(damaged)


def test_lock_has_all_packed_packages_with_hashes() -> None:
    lines = pack_run.locked_lines(pack_run.LOCK.read_text(), ("vllm", *pack_run.PACKAGES))
    assert lines.count("==") == len(set(pack_run.PACKAGES)) + 1
    assert lines.count("--hash=sha256:") >= lines.count("==")


def test_packs_refuse_packages_of_the_machine_and_unknown_ones() -> None:
    lock = pack_run.LOCK.read_text()
    with pytest.raises(pack_run.PackError, match="torch must not be in a pack"):
        pack_run.locked_lines(lock, ("torch",))
    with pytest.raises(pack_run.PackError, match="no package unheard-of"):
        pack_run.locked_lines(lock, ("unheard-of",))


def test_first_packages_are_packed() -> None:
    assert set(pack_run.FIRST) <= set(pack_run.PACKAGES)


def test_archive_is_reproducible_and_unpacks(tmp_path: Path) -> None:
    files = [("vllm/__init__.py", b"version = 1\n"), ("vllm/kernel.abi3.so", bytes(1000))]
    for name in ("one", "two"):
        pack_run.write_archive(tmp_path / name, files)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    pack_run.unpack(tmp_path / "one", tmp_path / "site")
    assert {name: (tmp_path / "site" / name).read_bytes() for name, _ in files} == dict(files)


def test_sums_find_damaged_missing_and_unlisted_files(tmp_path: Path) -> None:
    for name in ("a.whl", "b.whl"):
        (tmp_path / name).write_text(name)
    pack_run.write_sums(tmp_path)
    assert pack_run.check_sums(tmp_path) == 10 + (tmp_path / pack_run.SUMS).stat().st_size
    (tmp_path / "a.whl").write_text("other")
    with pytest.raises(pack_run.PackError, match=r"a\.whl has another SHA-256 sum"):
        pack_run.check_sums(tmp_path)
    (tmp_path / "a.whl").unlink()
    with pytest.raises(pack_run.PackError, match=r"a\.whl is missing"):
        pack_run.check_sums(tmp_path)
    (tmp_path / "a.whl").write_text("a.whl")
    (tmp_path / "c.whl").touch()
    with pytest.raises(pack_run.PackError, match=r"c\.whl is not listed"):
        pack_run.check_sums(tmp_path)


def test_sizes_are_limited_alone_and_with_the_checkout() -> None:
    pack_run.check_sizes({"run1": pack_run.PACK_LIMIT}, pack_run.UPLOAD_LIMIT - pack_run.PACK_LIMIT)
    with pytest.raises(pack_run.PackError, match=r"run1 has 46,000,001 bytes"):
        pack_run.check_sizes({"run1": pack_run.PACK_LIMIT + 1}, 0)
    with pytest.raises(pack_run.PackError, match="run2 and the checkout"):
        pack_run.check_sizes({"run2": 40_000_000}, pack_run.UPLOAD_LIMIT - 40_000_000 + 1)


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("vllm/entrypoints/launchers/app.py", True),
        ("vllm/model_executor/layers/fused_moe/configs/a.json", True),
        ("vllm-0.32.0.dist-info/METADATA", True),
        ("vllm-0.32.0.dist-info/entry_points.txt", True),
        ("vllm/third_party/pynvml.py", True),
        ("vllm-0.32.0.dist-info/RECORD", False),
        ("vllm/vllm-rs", False),
        ("vllm/_C_stable_libtorch.abi3.so", False),
        ("vllm/third_party/deep_gemm/__init__.py", False),
    ],
)
def test_packed_files_of_the_engine(name: str, kept: bool) -> None:
    assert (pack_run._OMITTED.match(name) is None) == kept


def make_lock(**contents: bytes) -> str:
    """Return a lock of packages with one wheel each, by the content of the wheel."""
    pins = (
        f"{name}==1.0 \\\n    --hash=sha256:{hashlib.sha256(content).hexdigest()}\n"
        for name, content in contents.items()
    )
    return "".join(pins)


class Index:
    """Stand-in of a package index; `contents` are its wheels by package."""

    def __init__(self, **contents: bytes) -> None:
        self.contents = contents
        self.asked: list[list[str]] = []

    def download(self, lock: Path, target: Path) -> None:
        names = [line.partition("==")[0] for line in lock.read_text().splitlines() if "==" in line]
        self.asked.append(names)
        for name in names:
            (target / f"{name}-1.0-py3-none-any.whl").write_bytes(self.contents[name])


def test_fetch_downloads_only_missing_and_damaged_wheels(tmp_path: Path) -> None:
    contents = {"one": b"1", "two": b"2", "three": b"3"}
    index, lock = Index(**contents), make_lock(**contents)
    pack_wheels.fetch_wheels(tmp_path, lock, index.download)
    (tmp_path / "one-1.0-py3-none-any.whl").write_bytes(b"damaged")
    (tmp_path / "two-1.0-py3-none-any.whl").unlink()
    (tmp_path / "old-1.0-py3-none-any.whl").touch()
    (tmp_path / "partial-x").mkdir()
    (tmp_path / "rlrun-0.1.0-py3-none-any.whl").touch()
    pack_wheels.fetch_wheels(tmp_path, lock, index.download)
    pack_wheels.fetch_wheels(tmp_path, lock, index.download)
    assert index.asked == [["one", "three", "two"], ["one", "two"]]
    assert sorted(path.name.split("-")[0] for path in tmp_path.iterdir()) == ["one", "rlrun", "three", "two"]
    assert (tmp_path / "one-1.0-py3-none-any.whl").read_bytes() == b"1"


def test_fetch_refuses_a_damaged_download_and_a_full_volume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(pack_wheels.PackError, match=r"no wheel of one after the download"):
        pack_wheels.fetch_wheels(tmp_path, make_lock(one=b"1"), Index(one=b"other").download)
    monkeypatch.setattr(pack_wheels, "WHEEL_BYTES", 10**18)
    with pytest.raises(pack_wheels.PackError, match=r"are needed; delete files, or set RLRUN_GPU_PACKS"):
        pack_wheels.fetch_wheels(tmp_path, make_lock(one=b"1"), Index(one=b"1").download)


@pytest.mark.parametrize(
    ("errors", "message"),
    [
        (
            "WARNING: Retrying after NewConnectionError('[Errno -3] Temporary failure in name resolution')\n"
            "ERROR: No matching distribution found for a==1",
            r"index cannot be reached \(\[Errno -3\] Temporary failure in name resolution\); run this where there is a network",
        ),
        (
            "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device",
            r"cannot download the wheels: .* No space left on device",
        ),
    ],
)
def test_failed_download_names_the_cause(
    errors: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = subprocess.CompletedProcess([], 1, "", errors)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(pack_wheels.PackError, match=message):
        pack_wheels.download_wheels(tmp_path / "lock.txt", tmp_path)


def test_archive_is_made_once_for_a_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack_run, "vllm_files", lambda wheel: [("vllm/a.py", wheel.read_bytes())])
    wheel = tmp_path / "vllm-1.whl"
    wheel.write_bytes(b"first")
    first = pack_run.make_archive(wheel, tmp_path / "archive")
    made = first.stat().st_mtime_ns
    (tmp_path / "archive" / "vllm-0.tar.xz.new").touch()
    assert pack_run.make_archive(wheel, tmp_path / "archive").stat().st_mtime_ns == made
    wheel.write_bytes(b"second")
    second = pack_run.make_archive(wheel, tmp_path / "archive")
    assert [*(tmp_path / "archive").iterdir()] == [second] != [first]
