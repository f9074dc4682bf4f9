"""Binaries of the test clusters: their sources, cache keys and error messages."""

import hashlib
import io
import shutil
import tarfile
from pathlib import Path

import pytest

from tests.cluster import ClusterError, binaries, packages
from tests.cluster.binaries import TOOLS, Tool, find, module_key
from tests.cluster.downloads import DownloadError, Release, checksum_of, unpack
from tests.cluster.progress import Progress

SILENT = Progress(lambda _: None)


@pytest.fixture(autouse=True)
def nothing_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Empty cache, no Go, no network."""
    monkeypatch.setenv("RLRUN_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("RLRUN_KUBE_BIN", raising=False)
    monkeypatch.setattr(binaries, "go_version", lambda: "")

    def unreachable(self: Release, version: str) -> bytes:
        raise DownloadError("no network")

    monkeypatch.setattr(Release, "fetch", unreachable)


def write_executable(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def test_configured_folder_precedes_binary_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cached = write_executable(tmp_path / "cache/bin" / f"etcd-{module_key(TOOLS['etcd'])}-release/etcd")
    assert find("etcd", progress=SILENT) == {"etcd": cached}
    given = write_executable(tmp_path / "given/etcd")
    monkeypatch.setenv("RLRUN_KUBE_BIN", str(given.parent))
    assert find("etcd", progress=SILENT) == {"etcd": given}


def test_download_is_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Release, "fetch", lambda self, version: f"etcd {version}".encode())
    path = find("etcd", progress=SILENT)["etcd"]
    assert path.read_text() == f"etcd {TOOLS['etcd'].version}"
    monkeypatch.undo()
    monkeypatch.setenv("RLRUN_CACHE", str(path.parents[2]))
    assert find("etcd", progress=SILENT)["etcd"] == path


def test_missing_binary_source_names_the_alternatives() -> None:
    with pytest.raises(
        ClusterError, match=r"kube is neither in RLRUN_KUBE_BIN nor .*no Go is on PATH: install Go 1\.26"
    ):
        find("kube", progress=SILENT)


def test_old_go_version_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binaries, "go_version", lambda: "1.19.8")
    with pytest.raises(ClusterError, match=r"Go 1\.19\.8 is on PATH: install Go 1\.26 or later"):
        find("pause", progress=SILENT)


def test_cache_key_changes_with_module_and_checksums(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(binaries, "MODULES", tmp_path)
    tool = Tool("etcd")
    tool.folder.mkdir()
    keys = []
    for file, text in (("go.mod", "a"), ("go.sum", "b"), ("main.go", "c"), ("go.sum", "d"), ("notes.md", "e")):
        (tool.folder / file).write_text(text)
        keys.append(module_key(tool))
    assert len(set(keys[:4])) == 4
    assert keys[4] == keys[3], "a file that is not compiled decides nothing"


def test_each_tool_is_pinned_without_registry() -> None:
    for tool in TOOLS.values():
        module = (tool.folder / "go.mod").read_text()
        assert "://" not in module
        if tool.module:
            assert tool.version
            assert f"{tool.module} v{tool.version} " in (tool.folder / "go.sum").read_text()


def test_checksum_files_of_both_formats_are_read() -> None:
    digest = hashlib.sha256(b"x").hexdigest()
    assert checksum_of(f"{digest}\n", "kubectl") == digest
    assert checksum_of(f"{'0' * 64}  other\n{digest}  dist/etcd.tar.gz\n", "etcd.tar.gz") == digest
    with pytest.raises(DownloadError, match=r"does not name etcd\.tar\.gz"):
        checksum_of(f"{'0' * 64}  other\n{'1' * 64}  another\n", "etcd.tar.gz")


def test_file_is_extracted_from_archive() -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        entry = tarfile.TarInfo("linux-amd64/helm")
        entry.size = 4
        tar.addfile(entry, io.BytesIO(b"helm"))
    assert unpack(buffer.getvalue(), "linux-amd64/helm") == b"helm"
    with pytest.raises(DownloadError, match="holds no file none"):
        unpack(buffer.getvalue(), "none")


def test_missing_packages_are_reported_with_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "PACKAGES", {"containerd": "no-such-program", "coreutils": "ls"})
    monkeypatch.setattr(shutil, "which", lambda program, path=None: "/bin/ls" if program == "ls" else None)
    with pytest.raises(ClusterError, match=r"sudo apt-get install -y containerd$"):
        packages.ensure_packages(SILENT)
