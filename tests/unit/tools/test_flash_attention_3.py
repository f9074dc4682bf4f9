"""The wheel of FlashAttention 3: content, record and errors. `tests/tensors/attention/test_published_wheels.py` loads the real library."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import sys
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest

from tools import flash_attention_3
from tools.flash_attention_3 import SOURCES, VERSION, WHEEL, SourceError, main, read_files, write_wheel


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """Folder with the files of the two packages, with other content."""
    for source in SOURCES.values():
        file = tmp_path / "installed" / source.replace("*", "12.9.79")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"content of {file.name}")
    return tmp_path / "installed"


def test_wheel_contains_library_licenses_and_record(installed: Path, tmp_path: Path) -> None:
    wheel = write_wheel(read_files(installed), tmp_path / "wheels")
    assert wheel.name == WHEEL
    with zipfile.ZipFile(wheel) as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    assert content["flash_attn_3/flash_attn_3.so"] == b"content of _C.so"
    assert content["flash_attn_3/libcudart.so.12"] == b"content of libcudart.so.12"
    info = f"flash_attn_3-{VERSION}.dist-info"
    metadata = HeaderParser().parsestr(content[f"{info}/METADATA"].decode())
    assert (metadata["Name"], metadata["Version"]) == ("flash-attn-3", VERSION)
    for license_file in metadata.get_all("License-File", []):
        assert f"{info}/licenses/{license_file}" in content
    record = {row[0]: row[1:] for row in csv.reader(io.StringIO(content.pop(f"{info}/RECORD").decode()))}
    assert record.pop(f"{info}/RECORD") == ["", ""]
    digests = {name: base64.urlsafe_b64encode(hashlib.sha256(data).digest()) for name, data in content.items()}
    assert record == {
        name: [f"sha256={digests[name].rstrip(b'=').decode()}", str(len(data))] for name, data in content.items()
    }


def test_same_files_give_the_same_wheel(installed: Path, tmp_path: Path) -> None:
    first, second = (write_wheel(read_files(installed), tmp_path / name) for name in ("a", "b"))
    assert first.read_bytes() == second.read_bytes()


def test_missing_file_is_named(installed: Path) -> None:
    (installed / "xformers/flash_attn_3/_C.so").unlink()
    with pytest.raises(
        SourceError, match=r"contains 0 files xformers/flash_attn_3/_C\.so; install requirements/images/flash-a"
    ):
        read_files(installed)


def test_library_of_another_release_is_refused(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["flash_attention_3", str(installed), str(tmp_path / "wheels")])
    assert main() == 66
    assert "not a 64-bit little-endian ELF file" in capsys.readouterr().err
    monkeypatch.setattr(flash_attention_3, "keep_hopper", lambda library: library)
    assert main() == 66
    assert f"instead of {flash_attention_3.SHA256}; install the packages by hash again" in capsys.readouterr().err
    assert not list((tmp_path / "wheels").glob("*.whl"))
