"""The three calls of the harness: up, attach, down. Providers are imported when one is used."""

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
    """Bring a cluster up, or return it when it is up.

    Args:
        name: clusters of different names are independent of each other.
        nodes: how many nodes run real containers; 0 gives a control plane for fake nodes alone, in half the time.
        kwok: whether `add_fake_nodes` shall work.
        images: docker archives whose images every node has from the start. Large ones belong here: they are unpacked
            once, `load_image` unpacks on each node.
        provider: "kubeconfig", "kind" or "native". Default: `$RLRUN_PROVIDER`, else the first that works.
        tie: native only: end the cluster's processes when the thread that calls this ends, however it does. Folders and
            cgroups stay until the next `up` or `down` of that name.
        progress: prints what happens; silent by default.

    Raises:
        ClusterError: what is missing or did not start, and what to do.
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
    """The cluster `name` that is up.

    Raises:
        ClusterError: it is not.
    """
    cluster = find(name)
    if cluster is None:
        raise ClusterError(f"cluster {name} is not up: python -m tests.cluster up --name {name}")
    return cluster


def find(name: str) -> Cluster | None:
    """The cluster `name`; None when it is not up."""
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
    """Take a cluster down and remove what it left; a given cluster is only forgotten.

    Returns:
        Whether there was anything.

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
    """Who provides the cluster `name`; empty when there is none of that name."""
    try:
        record = json.loads((clusters_root() / name / "cluster.json").read_text())
    except FileNotFoundError:
        return ""
    return str(record["provider"])


def names() -> list[str]:
    """Names of all clusters that are recorded."""
    return sorted(folder.name for folder in clusters_root().glob("*/"))
