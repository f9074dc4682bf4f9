"""Durable writes: files fsynced, then renamed, then the directory fsynced.

A reader that sees a final name therefore sees whole content, whenever the writer or the machine died.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import zlib
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rlrun.diagnostics.fault_points import reach
from rlrun.protocol.files.paths import TMP_SUFFIX

KEY = "crc32"
"""Key of a JSON document's checksum."""


def fsync_path(path: Path) -> None:
    """Flush a file's content or a directory's entries to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_tree(folder: Path) -> None:
    """Flush every file and folder below `folder`, and `folder` itself."""
    for directory, _, files in os.walk(folder):
        for name in files:
            fsync_path(Path(directory) / name)
        fsync_path(Path(directory))


def make_folder(path: Path) -> None:
    """Create a folder and its missing parents, where they are not there, durable: each name is flushed to the folder that it is in."""
    if path.is_dir():
        return
    make_folder(path.parent)
    path.mkdir(exist_ok=True)
    fsync_path(path.parent)


def make_private_folder(path: Path) -> bool:
    """Create a folder, durable, that only its user can open; missing parents are as the user's mask makes them.

    Returns:
        False if the folder was there before and others can open it.
    """
    make_folder(path.parent)
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        return path.stat().st_mode & 0o077 == 0
    fsync_path(path.parent)
    return True


def write_bytes(path: Path, content: bytes, *, before_rename: str | None = None) -> None:
    """Replace `path` with `content` in one step; a reader sees the old content or the new, never a part.

    Args:
        path: the file.
        content: all of it.
        before_rename: the fault point (`fault_points`) at which all is durable but the name.
    """
    write_chunks(path, (content,), before_rename=before_rename)


def write_chunks(path: Path, chunks: Iterable[bytes], *, before_rename: str | None = None) -> None:
    """Replace `path` with the concatenated `chunks`, which may come from the old file; see `write_bytes`."""
    make_folder(path.parent)
    temporary = path.with_name(path.name + TMP_SUFFIX)
    try:
        with temporary.open("wb") as file:
            file.writelines(chunks)
            file.flush()
            os.fsync(file.fileno())
        if before_rename is not None:
            reach(before_rename)
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):  # the volume may refuse this, too; the first error explains more
            temporary.unlink(missing_ok=True)
        raise
    fsync_path(path.parent)


def write_json(path: Path, document: object, *, before_rename: str | None = None) -> None:
    """Replace `path` with `document` as JSON, in one step; see `write_bytes`."""
    write_bytes(path, (json.dumps(document, indent=1, sort_keys=True) + "\n").encode(), before_rename=before_rename)


def create_json(path: Path, document: object, *, before_link: str | None = None) -> None:
    """Write `document` to a path that must not exist yet; `before_link` is a fault point as in `write_bytes`.

    A try that failed after its name appeared, because the volume refused the last flush, is completed by the next one.

    Raises:
        FileExistsError: another writer was first; two writers with different documents never both succeed.
    """
    make_folder(path.parent)
    content = json.dumps(document, indent=1, sort_keys=True)
    # A random name, not the process id: in containers two writers of one volume often have the same one.
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}{TMP_SUFFIX}")
    try:
        with temporary.open("x") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if before_link is not None:
            reach(before_link)
        _link_own(temporary, path, content)
    finally:
        with suppress(OSError):  # see `write_bytes`
            temporary.unlink(missing_ok=True)
    fsync_path(path.parent)


def _link_own(temporary: Path, path: Path, content: str) -> None:
    try:
        os.link(temporary, path)  # as exclusive as O_EXCL, and never seen half-written
    except FileExistsError:
        if path.read_text() != content:
            raise


def remove_folder(path: Path) -> None:
    """Remove a folder with everything in it, if it exists.

    Raises:
        OSError: the volume refuses. An ignored refusal shows later, as a `FileExistsError` that does not name the volume.
    """
    with suppress(FileNotFoundError):
        shutil.rmtree(path)


@contextmanager
def new_folder(path: Path, *, before_rename: str | None = None) -> Iterator[Path]:
    """Fill a temporary folder that becomes `path`, durable and whole, when the block ends without an error.

    An older folder at `path` is replaced: within one attempt there is one writer, and it writes the same thing again. `before_rename` is
    a fault point as in `write_bytes`.
    """
    make_folder(path.parent)
    temporary = path.with_name(path.name + TMP_SUFFIX)
    remove_folder(temporary)  # of a try that the volume refused
    temporary.mkdir()
    try:
        yield temporary
        fsync_tree(temporary)
        if before_rename is not None:
            reach(before_rename)
        put_in_place(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def put_in_place(temporary: Path, path: Path) -> None:
    """Make the durable folder `temporary` become `path`, in place of an older one. At no moment is `path` a part of a folder."""
    older = path.with_name(f"{path.name}.old{TMP_SUFFIX}")
    remove_folder(older)
    if path.exists():
        path.rename(older)
    try:
        temporary.rename(path)
    except OSError:
        with suppress(OSError):  # readers keep the older one, if the volume allows that
            older.rename(path)
        raise
    fsync_path(path.parent)
    shutil.rmtree(older, ignore_errors=True)


def link_files(source: Path, target: Path, *, leave_out: Container[str] = ()) -> None:
    """Put every file of the folder `source` into the folder `target` too: as a hard link, which costs no space and outlives a deletion of
    the first name, or as a copy where the volume has no links."""
    for file in sorted(source.iterdir()):
        if file.name in leave_out or not file.is_file():
            continue
        try:
            os.link(file.resolve(), target / file.name)
        except OSError:  # a file system without links: those that cannot write either fail in the copy
            shutil.copyfile(file, target / file.name)


class ChecksumError(ValueError):
    """Error for a document that is not what was written."""


def document_crc32(document: object) -> int:
    """CRC-32 of the content of a JSON document without its key `crc32`."""
    return zlib.crc32(json.dumps(document, sort_keys=True).encode())


def check_document(document: dict[str, object]) -> bool:
    """Remove the key `crc32` and compare it; False if the document has none, as those of earlier releases.

    Raises:
        ChecksumError: it is not what was written.
    """
    if KEY not in document:
        return False
    if document.pop(KEY) != document_crc32(document):
        raise ChecksumError("it has another checksum than when it was written")
    return True
