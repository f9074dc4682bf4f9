"""Image archives: identity and invalid files."""

import tarfile
from pathlib import Path

import pytest

from tests.cluster import ClusterError
from tests.cluster.docker_archive import read_content, write_archive
from tests.cluster.native.golden import outdated, with_newest


def archive(path: Path, content: bytes, name: str = "localhost/x:1") -> Path:
    write_archive(path, name, {"program": content}, ["/program"])
    return path


def test_image_key_depends_on_content_and_name(tmp_path: Path) -> None:
    one = read_content(archive(tmp_path / "one.tar", b"one"))
    again = read_content(archive(tmp_path / "again.tar", b"one"))
    other = read_content(archive(tmp_path / "other.tar", b"two"))
    renamed = read_content(archive(tmp_path / "renamed.tar", b"one", "localhost/y:1"))
    assert one == again
    assert len({one.key, other.key, renamed.key}) == 3


def test_image_name_refers_to_newest_archive(tmp_path: Path) -> None:
    old = read_content(archive(tmp_path / "old.tar", b"one"))
    new = read_content(archive(tmp_path / "new.tar", b"two"))
    table = with_newest(with_newest({}, old), new)
    assert new.is_in(table)
    assert not old.is_in(table), "importing the old one again must bring it back"
    assert old.is_in(with_newest(table, old))


def test_outdated_builds_are_dropped_unless_requested() -> None:
    table = {"localhost/op:1": "a", "localhost/stub:1": "b", "localhost/op:2": "c", "localhost/op:3": "d"}
    assert outdated(table, requested=()) == ["localhost/op:1", "localhost/op:2"]
    assert outdated(table, requested={"localhost/op:1"}) == ["localhost/op:2"]


def test_imported_build_becomes_the_newest(tmp_path: Path) -> None:
    again = read_content(archive(tmp_path / "again.tar", b"one", "localhost/op:1"))
    table = with_newest({"localhost/op:1": "old", "localhost/op:2": "x"}, again)
    assert outdated(table, requested=()) == ["localhost/op:2"]


def test_invalid_archives_are_refused_with_fix(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="does not exist"):
        read_content(tmp_path / "none.tar")
    (tmp_path / "text.tar").write_text("not a tar")
    with pytest.raises(ClusterError, match=r"no uncompressed docker archive.*docker save -o FILE IMAGE"):
        read_content(tmp_path / "text.tar")
    with tarfile.open(tmp_path / "empty.tar", "w"):
        pass
    with pytest.raises(ClusterError, match="no uncompressed docker archive"):
        read_content(tmp_path / "empty.tar")
