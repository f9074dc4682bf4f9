"""Folders that outlast a checkout (binaries, image layers, cluster state), and the locks on them."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TextIO

from .preparation.commands import POLL_SECONDS, check_allowed


def cache_root() -> Path:
    """The folder of everything kept outside the checkout: `$RLRUN_CACHE`, else `~/.cache/rlrun`."""
    chosen = os.environ.get("RLRUN_CACHE")
    return Path(chosen).resolve() if chosen else Path.home() / ".cache" / "rlrun"


def clusters_root() -> Path:
    """The folder that holds one folder of state for each cluster that is up."""
    return cache_root() / "clusters"


def full_disk_advice() -> str:
    """Return the fix for a full disk: all folders that grow, and the variables that move them."""
    return (
        f"a disk is full: free some space, or set RLRUN_CACHE (now {cache_root()}), and GOCACHE and GOMODCACHE "
        "(see `go env GOCACHE GOMODCACHE`), to folders on a larger disk. Then repeat the command"
    )


@contextmanager
def locked(name: str, *, shared: bool = False, waiting: AbstractContextManager[object] | None = None) -> Iterator[None]:
    """Hold the lock `name` against every other process that uses the same cache.

    Args:
        name: guarded resource ("golden", "network", "binary-kube", "cluster-NAME").
        shared: whether readers may hold it together; a writer waits for all of them.
        waiting: context entered while another process holds the lock, such as a step of a `Progress`.
    """
    folder = cache_root() / "locks"
    folder.mkdir(parents=True, exist_ok=True)
    mode = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    with (folder / name).open("w") as handle:
        try:
            fcntl.flock(handle, mode | fcntl.LOCK_NB)
        except BlockingIOError:
            with waiting or nullcontext():
                _wait_for_lock(handle, mode, name)
        yield


def _wait_for_lock(handle: TextIO, mode: int, name: str) -> None:
    """Poll: a thread that waits in the kernel could not be stopped."""
    while True:
        check_allowed(f"lock {name}")
        with suppress(BlockingIOError):
            fcntl.flock(handle, mode | fcntl.LOCK_NB)
            return
        time.sleep(POLL_SECONDS)
