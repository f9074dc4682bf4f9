"""Process groups of tests: destroyed after each test or case, with a check of the threads.

`dist.destroy_process_group` of torch 2.13 removes a group of Gloo from the registries, but does not stop its three
threads: they end with the last reference to the group. Meshes hold references to groups; models and caches of DTensor
hold references to meshes.
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from torch.distributed.distributed_c10d import _world
from torch.distributed.tensor import _redistribute, debug
from torch.distributed.tensor._collective_utils import MeshTopoInfo

THREADS = {"gloo_tcp_loop": 1, "pt_gloo_runloop": 2}
"""Threads of a group of Gloo, by name: one receives, two run collectives."""
SECONDS = 60.0
"""Longest wait for threads that are about to end."""
_POLL_SECONDS = 0.01


def gloo_threads(pid: int | str = "self") -> Counter[str]:
    """Return the number of Gloo threads of a process, by name."""
    names: Counter[str] = Counter()
    for thread in Path(f"/proc/{pid}/task").iterdir():
        try:
            names[(thread / "comm").read_text().strip()] += 1
        except OSError:  # it has just ended
            continue
    return Counter({name: names[name] for name in THREADS})


def count_groups() -> int:
    """Return the number of registered process groups; `dist.get_pg_count` counts destroyed ones as well."""
    return len(_world.pg_map)


@contextmanager
def created_groups_destroyed() -> Iterator[None]:
    """Destroy the process groups that the block creates, after it. Their threads end with the last reference to each."""
    before = set(_world.pg_map)
    yield
    created = [group for group in _world.pg_map if group not in before]
    if created:
        clear_plans()
    while created:
        dist.destroy_process_group(created.pop())


def clear_plans() -> None:
    """Clear the caches of DTensor: an equal mesh of a later layout would get plans that refer to the groups of this one."""
    debug._clear_sharding_prop_cache()
    _redistribute._gen_transform_infos.cache_clear()
    _redistribute.clear_redistribute_planner_cache()
    MeshTopoInfo.build_from_mesh.cache_clear()


def assert_threads_ended(*, most: int | None = None) -> None:
    """Fail if there are more Gloo threads than the registered groups have, or more groups than `most`."""
    groups = list(_world.pg_map)
    names = ", ".join(f"{one.group_name} ({one.group_desc}) of ranks {_world.pg_group_ranks[one]}" for one in groups)
    assert most is None or len(groups) <= most, f"more than {most} process groups: {names}"
    expected = Counter({name: count * len(groups) for name, count in THREADS.items()})
    if gloo_threads() <= expected:
        return
    gc.collect()
    deadline = time.monotonic() + SECONDS
    while not (found := gloo_threads()) <= expected:
        if time.monotonic() > deadline:
            raise AssertionError(f"{dict(found)} instead of {dict(expected)} threads; process groups: {names}")
        time.sleep(_POLL_SECONDS)
