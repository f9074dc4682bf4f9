"""Durable writes: fsync the file, rename it, then fsync the directory.

A reader that sees a final name therefore sees the complete content, even if the writer or the machine has crashed.
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
    """Create a folder and its missing parents durably: each new name is flushed to its parent folder."""
    if path.is_dir():
        return
    make_folder(path.parent)
    path.mkdir(exist_ok=True)
    fsync_path(path.parent)


def make_private_folder(path: Path) -> bool:
    """Create a folder durably that only its user can open; missing parents follow the user's umask.

    Returns:
        False if the folder existed and other users can open it.
    """
    make_folder(path.parent)
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        return path.stat().st_mode & 0o077 == 0
    fsync_path(path.parent)
    return True


def write_bytes(path: Path, content: bytes, *, before_rename: str | None = None) -> None:
    """Replace `path` with `content` atomically: a reader sees the old content or the new content, never a part.

    Args:
        path: file to replace.
        content: complete new content.
        before_rename: fault point (`fault_points`) at which everything except the name is durable.
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
        with suppress(OSError):  # the volume may refuse this too; the first error explains more
            temporary.unlink(missing_ok=True)
        raise
    fsync_path(path.parent)


def write_json(path: Path, document: object, *, before_rename: str | None = None) -> None:
    """Replace `path` with `document` as JSON, atomically; see `write_bytes`."""
    write_bytes(path, (json.dumps(document, indent=1, sort_keys=True) + "\n").encode(), before_rename=before_rename)


def create_json(path: Path, document: object, *, before_link: str | None = None) -> None:
    """Write `document` to a path that must not exist yet; `before_link` is a fault point as in `write_bytes`.

    If a call fails after the name exists, because the volume refuses the last flush, a repeated call completes it.

    Raises:
        FileExistsError: another writer was first; two writers with different documents never both succeed.
    """
    make_folder(path.parent)
    content = json.dumps(document, indent=1, sort_keys=True)
    # A random name instead of the process id: in containers, two writers of one volume often have the same id.
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
        os.link(temporary, path)  # as exclusive as O_EXCL, and readers never see a partial file
    except FileExistsError:
        if path.read_text() != content:
            raise


def remove_folder(path: Path) -> None:
    """Remove a folder with its content, if it exists.

    Raises:
        OSError: the volume refuses. An ignored refusal would appear later as a `FileExistsError` that does not name the volume.
    """
    with suppress(FileNotFoundError):
        shutil.rmtree(path)


@contextmanager
def new_folder(path: Path, *, before_rename: str | None = None) -> Iterator[Path]:
    """Fill a temporary folder that becomes `path`, durable and complete, if the block ends without an error.

    An older folder at `path` is replaced: an attempt has one writer, which writes the same content again. `before_rename` is a fault
    point as in `write_bytes`.
    """
    make_folder(path.parent)
    temporary = path.with_name(path.name + TMP_SUFFIX)
    remove_folder(temporary)  # left by a refused write
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
    """Rename the durable folder `temporary` to `path` and replace an older one. `path` is never a partial folder."""
    # Two renames: a reader between them finds no folder at `path`, but never a partial one.
    older = path.with_name(f"{path.name}.old{TMP_SUFFIX}")
    remove_folder(older)
    if path.exists():
        path.rename(older)
    try:
        temporary.rename(path)
    except OSError:
        with suppress(OSError):  # readers keep the older one if the volume allows the rename
            older.rename(path)
        raise
    fsync_path(path.parent)
    shutil.rmtree(older, ignore_errors=True)


def link_files(source: Path, target: Path, *, leave_out: Container[str] = ()) -> None:
    """Link every file of the folder `source` into the folder `target`: as a hard link, which needs no space and survives the deletion of
    the first name, or as a copy if the volume has no links."""
    for file in sorted(source.iterdir()):
        if file.name in leave_out or not file.is_file():
            continue
        try:
            os.link(file.resolve(), target / file.name)
        except OSError:  # a file system without links; if the volume refuses writes, the copy fails too
            shutil.copyfile(file, target / file.name)


class ChecksumError(ValueError):
    """Error for a document whose checksum is wrong."""


def document_crc32(document: object) -> int:
    """Return the CRC-32 of a JSON document without its key `crc32`."""
    return zlib.crc32(json.dumps(document, sort_keys=True).encode())


def check_document(document: dict[str, object]) -> bool:
    """Remove the key `crc32` and compare it. Returns False if the document, of an earlier release, has none.

    Raises:
        ChecksumError: the checksum is wrong.
    """
    if KEY not in document:
        return False
    if document.pop(KEY) != document_crc32(document):
        raise ChecksumError("its checksum is wrong")
    return True
