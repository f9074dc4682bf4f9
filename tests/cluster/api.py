"""The three calls of the harness: up, attach, down. A provider is imported at its first use."""

import json
from collections.abc import Sequence
from pathlib import Path

from .base import Cluster
from .cache import clusters_root
from .errors import ClusterError
from .native.plan import check_name
from .progress import Progress
from .provider import detect_provider

__all__ = ["DEFAULT_NAME", "Cluster", "attach", "down", "find", "names", "recorded_provider", "up"]
DEFAULT_NAME = "dev"


def up(
    name: str = DEFAULT_NAME,
    *,
    nodes: int = 2,
    kwok: bool = True,
    images: Sequence[Path] = (),
    provider: str | None = None,
    tie: bool = False,
    progress: Progress | None = None,
) -> Cluster:
    """Start a cluster, or return it if it is up.

    Args:
        name: name of the cluster; clusters of different names are independent of each other.
        nodes: number of nodes that run real containers; 0 gives a control plane for fake nodes only, in half the time.
        kwok: whether `add_fake_nodes` is available.
        images: docker archives whose images every node has from the start. Large images belong here: they are unpacked
            once, while `load_image` unpacks on each node.
        provider: "kubeconfig", "kind" or "native". Default: `$RLRUN_PROVIDER`, else the first that works.
        tie: native only: end the cluster's processes when the calling thread ends for any reason. Folders and cgroups
            stay until the next `up` or `down` of that name.
        progress: printer of progress lines; silent by default.

    Raises:
        ClusterError: something is missing or did not start; the message has the fix.
    """
    progress = progress or Progress(lambda _: None)
    check_name(name)
    chosen = detect_provider(provider)
    if chosen == "kubeconfig":
        from . import given

        return given.up(name, images=images, progress=progress)
    if chosen == "kind":
        from . import kind

        return kind.up(name, nodes=nodes, kwok=kwok, images=images, progress=progress)
    from .native import lifecycle

    return lifecycle.up(name, nodes=nodes, kwok=kwok, images=images, tie=tie, progress=progress)


def attach(name: str = DEFAULT_NAME) -> Cluster:
    """Return the running cluster `name`.

    Raises:
        ClusterError: it is not up.
    """
    cluster = find(name)
    if cluster is None:
        raise ClusterError(f"cluster {name} is not up: python -m tests.cluster up --name {name}")
    return cluster


def find(name: str) -> Cluster | None:
    """Return the cluster `name`, or None if it is not up."""
    found: Cluster | None = None
    match recorded_provider(name):
        case "kubeconfig":
            from . import given

            found = given.attach(name)
        case "kind":
            from . import kind

            found = kind.attach(name)
        case "native":
            from .native import lifecycle

            found = lifecycle.attach(name)
    return found


def down(name: str = DEFAULT_NAME, *, progress: Progress | None = None) -> bool:
    """Take a cluster down and remove its files; a given cluster is only removed from the records.

    Returns:
        Whether the cluster or remains of it existed.

    Raises:
        ClusterError: something cannot be removed.
    """
    progress = progress or Progress(lambda _: None)
    match recorded_provider(name):
        case "kubeconfig":
            from . import given

            return given.down(name)
        case "kind":
            from . import kind

            return kind.down(name)
    from .native import lifecycle

    return lifecycle.down(name, progress)


def recorded_provider(name: str) -> str:
    """Return the provider of the cluster `name`, empty if no such cluster is recorded."""
    try:
        record = json.loads((clusters_root() / name / "cluster.json").read_text())
    except FileNotFoundError:
        return ""
    return str(record["provider"])


def names() -> list[str]:
    """Return the names of all recorded clusters."""
    return sorted(folder.name for folder in clusters_root().glob("*/"))
