"""Where things live that outlast a checkout (binaries, image layers, cluster state), and the locks on them."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def cache_root() -> Path:
    """The folder of everything kept outside the checkout: `$RLRUN_CACHE`, else `~/.cache/rlrun`."""
    chosen = os.environ.get("RLRUN_CACHE")
    return Path(chosen).resolve() if chosen else Path.home() / ".cache" / "rlrun"


def clusters_root() -> Path:
    """The folder that holds one folder of state for each cluster that is up."""
    return cache_root() / "clusters"


@contextmanager
def locked(name: str, *, shared: bool = False) -> Iterator[None]:
    """Hold the lock called `name` against every other process that uses the same cache.

    Args:
        name: what is guarded ("golden", "network", "binary-kube", "cluster-NAME").
        shared: readers may hold it together; a writer waits for all of them.
    """
    folder = cache_root() / "locks"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / name).open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        yield
