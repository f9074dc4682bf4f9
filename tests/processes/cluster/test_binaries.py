"""Where binaries come from, what decides their key, and what is said when there is no way to get one."""

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
    """An empty cache, no Go, no network."""
    monkeypatch.setenv("RLRUN_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("RLRUN_KUBE_BIN", raising=False)
    monkeypatch.setattr(binaries, "go_version", lambda: "")

    def unreachable(self: Release, version: str) -> bytes:
        raise DownloadError("no network")

    monkeypatch.setattr(Release, "fetch", unreachable)


def executable(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def test_a_given_folder_comes_before_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cached = executable(tmp_path / "cache/bin" / f"etcd-{module_key(TOOLS['etcd'])}-release/etcd")
    assert find("etcd", progress=SILENT) == {"etcd": cached}
    given = executable(tmp_path / "given/etcd")
    monkeypatch.setenv("RLRUN_KUBE_BIN", str(given.parent))
    assert find("etcd", progress=SILENT) == {"etcd": given}


def test_a_download_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Release, "fetch", lambda self, version: f"etcd {version}".encode())
    path = find("etcd", progress=SILENT)["etcd"]
    assert path.read_text() == f"etcd {TOOLS['etcd'].version}"
    monkeypatch.undo()
    monkeypatch.setenv("RLRUN_CACHE", str(path.parents[2]))
    assert find("etcd", progress=SILENT)["etcd"] == path


def test_without_any_source_the_message_names_the_ways() -> None:
    with pytest.raises(
        ClusterError, match=r"kube is neither in RLRUN_KUBE_BIN nor .*no Go is on PATH: install Go 1\.26"
    ):
        find("kube", progress=SILENT)


def test_a_go_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binaries, "go_version", lambda: "1.19.8")
    with pytest.raises(ClusterError, match=r"Go 1\.19\.8 is on PATH: install Go 1\.26 or later"):
        find("pause", progress=SILENT)


def test_the_key_changes_with_the_module_and_its_sums(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(binaries, "MODULES", tmp_path)
    tool = Tool("etcd")
    tool.folder.mkdir()
    keys = []
    for file, text in (("go.mod", "a"), ("go.sum", "b"), ("main.go", "c"), ("go.sum", "d"), ("notes.md", "e")):
        (tool.folder / file).write_text(text)
        keys.append(module_key(tool))
    assert len(set(keys[:4])) == 4
    assert keys[4] == keys[3], "a file that is not compiled decides nothing"


def test_every_tool_is_pinned_and_names_no_registry() -> None:
    for tool in TOOLS.values():
        module = (tool.folder / "go.mod").read_text()
        assert "://" not in module
        if tool.module:
            assert tool.version
            assert f"{tool.module} v{tool.version} " in (tool.folder / "go.sum").read_text()


def test_checksum_files_of_both_kinds() -> None:
    digest = hashlib.sha256(b"x").hexdigest()
    assert checksum_of(f"{digest}\n", "kubectl") == digest
    assert checksum_of(f"{'0' * 64}  other\n{digest}  dist/etcd.tar.gz\n", "etcd.tar.gz") == digest
    with pytest.raises(DownloadError, match=r"does not name etcd\.tar\.gz"):
        checksum_of(f"{'0' * 64}  other\n{'1' * 64}  another\n", "etcd.tar.gz")


def test_a_file_is_taken_out_of_an_archive() -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        entry = tarfile.TarInfo("linux-amd64/helm")
        entry.size = 4
        tar.addfile(entry, io.BytesIO(b"helm"))
    assert unpack(buffer.getvalue(), "linux-amd64/helm") == b"helm"
    with pytest.raises(DownloadError, match="holds no file none"):
        unpack(buffer.getvalue(), "none")


def test_missing_packages_come_with_the_command_that_installs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "PACKAGES", {"containerd": "no-such-program", "coreutils": "ls"})
    monkeypatch.setattr(shutil, "which", lambda program, path=None: "/bin/ls" if program == "ls" else None)
    with pytest.raises(ClusterError, match=r"sudo apt-get install -y containerd$"):
        packages.ensure_packages(SILENT)
