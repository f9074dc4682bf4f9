"""Random and hostile resources, statuses and children: for any content, the operator continues and explains its waits.

The API server checks types by the CRD. The simulation does not, like a cluster with a CRD of another release or a
modified one.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import yaml

from rlrun.api.run_status import RLRunStatus
from rlrun.protocol.messages import lease_annotations as keys
from tests.sim import invariants
from tests.sim.world import NAME, ViolationError, World

EXAMPLES = Path(__file__).parents[2] / "examples"
SCALARS: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    2**70,
    1e308,
    -0.5,
    "",
    "x" * 5000,
    "\u202e\u0000\n{{",
    "9" * 400,
    "1e999",
    "NaN",
    [],
    {},
    [None],
    {"": None},
    [[[[{}]]]],
    "2999-13-40T99:00:00Z",
    "0001-01-01T00:00:00Z",
)
"""Values of wrong types. (`json` has neither NaN nor lone surrogates, because the API server refuses both.)"""
TOLD_AT_MOST = 2100
"""Characters of a message."""


def resource(random: Random) -> None:
    """Create a run from a manifest with some wrong values and keys."""
    found = mutated(random, random.choice(_manifests()), random.randint(1, 4))
    metadata = {**(_mapping(found.get("metadata"))), "name": NAME}
    annotations = metadata.get("annotations")
    metadata["annotations"] = annotations if isinstance(annotations, dict) else {}
    metadata["labels"] = {}
    spec = found.get("spec")  # the API server accepts only an object
    world = World(document={"metadata": metadata, "spec": spec if isinstance(spec, dict) else {}})
    _live(world, 4)
    _told(world)


def status(random: Random) -> None:
    """Fill the status of a healthy run with random values."""
    world = World(document={})
    world.calm(random.randint(1, 6))
    run = world.run
    assert run is not None
    world.api.put(run, status=mutated(random, world.status, random.randint(1, 5)))
    if random.random() < 0.5:
        _rewrites_lease(world, random, all_of_it=True)
    _live(world, 4)
    _told(world)


def children(random: Random) -> None:
    """Edit the children of a healthy run: all must return to their specification."""
    world = World()
    world.calm(random.randint(2, 7))
    for _ in range(random.randint(1, 4)):
        random.choice(_EDITS)(world, random)
        _live(world, random.randint(0, 2))
    world.rest()
    _told(world)


def _scales(world: World, random: Random) -> None:
    for kind in ("StatefulSet", "Deployment"):
        for found in world.api.all(kind):
            world.api.put(found, spec=found["spec"] | {"replicas": random.choice((0, 1, 5))})


def _rewrites_lease(world: World, random: Random, *, all_of_it: bool = False) -> None:
    """Rewrite annotations of the Lease with random text."""
    for found in world.api.all("Lease"):
        chosen = [key for key in keys.ALL if random.random() < 0.5 and (all_of_it or key != keys.STEP)]
        said = {key: str(random.choice(SCALARS)) for key in chosen}
        if all_of_it:
            said |= {keys.ATTEMPT: str(world.status.get("attempt"))}
        world.api.put(found, metadata=found["metadata"] | {"annotations": said})


def _relabels(world: World, random: Random) -> None:
    for kind in ("StatefulSet", "Deployment"):
        for found in world.api.all(kind):
            labels = found["metadata"]["labels"] | {"mine": "x" * 63}
            world.api.put(found, metadata=found["metadata"] | {"labels": labels})


def _deletes(world: World, random: Random) -> None:
    kind = random.choice(("StatefulSet", "Deployment", "Pod", "Lease"))
    for found in world.api.all(kind)[: random.randint(1, 2)]:
        world.api.end(kind, found["metadata"]["name"])


def _adds_a_stranger(world: World, random: Random) -> None:
    """Add a foreign pod with the run's labels."""
    pods = world.api.all("Pod")
    if pods:
        like = random.choice(pods)
        metadata = {"name": f"mine-{random.randrange(99)}", "labels": {"rlrun.io/run": NAME, "rlrun.io/role": "nobody"}}
        if world.api.get("Pod", metadata["name"]) is None:
            world.api.add({"kind": "Pod", "apiVersion": "v1", "metadata": metadata, "spec": like["spec"]})


_EDITS: tuple[Callable[[World, Random], None], ...] = (_scales, _rewrites_lease, _relabels, _deletes, _adds_a_stranger)


def mutated(random: Random, tree: Any, changes: int) -> Any:
    """Return a copy of `tree` with values replaced, removed, renamed or added at random places."""
    tree = json.loads(json.dumps(tree))
    for _ in range(changes):
        places = [place for place in _places(tree) if place[0]]
        if not places:
            return tree
        inner, key = random.choice(places)[0], None
        key = random.choice(list(inner) if isinstance(inner, dict) else range(len(inner)))
        match random.randrange(5):
            case 0:
                del inner[key]
            case 1 if isinstance(inner, dict):
                inner[random.choice(("", "x", "typo", "é" * 300))] = inner.pop(key)
            case 2 if isinstance(inner, dict):
                inner["more"] = copy.deepcopy(random.choice(SCALARS))
            case _:
                inner[key] = copy.deepcopy(random.choice(SCALARS))
    return tree


def _places(tree: Any) -> list[tuple[Any]]:
    found = [(tree,)] if isinstance(tree, dict | list) else []
    for inner in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ():
        found += _places(inner)
    return found


def _live(world: World, rounds: int) -> None:
    for _ in range(rounds):
        world.hear()
        world.operate()
        world.cluster.round()
        world.pass_time(1.0)


def _told(world: World) -> None:
    """Check the properties of every status, for any resource."""
    said = world.status
    try:
        RLRunStatus.model_validate(said)
    except ValueError as error:
        raise ViolationError(f"the operator's own status cannot be read: {error}") from error
    if said.get("phase") != invariants.derived(said) or not said.get("reason") or not said.get("message"):
        raise ViolationError(f"nothing explains phase {said.get('phase')}: {said.get('reason')} {said.get('message')}")
    words = [said["message"], *(c["message"] for c in said["conditions"])]
    for message in words:
        if "Traceback" in message or "pydantic" in message or "\n" in message or len(message) > TOLD_AT_MOST:
            raise ViolationError(f"not for people: {message[:400]!r}")


@cache
def _manifests() -> list[Any]:
    texts = [path.read_text() for path in sorted(EXAMPLES.glob("*.yaml"))]
    return [found for text in texts for found in yaml.safe_load_all(text) if found and found.get("kind") == "RLRun"]


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


CASES: tuple[Callable[[Random], None], ...] = (resource, status, children)


def fuzz(seed: int) -> str | None:
    """Test one resource and return its problem, or None."""
    case = CASES[seed % len(CASES)]
    try:
        case(Random(seed))
    except Exception as error:
        return f"{case.__name__} of seed {seed}: {type(error).__name__}: {error}"
    return None
