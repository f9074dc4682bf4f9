"""What is around a run: its cluster, objects of others, damage to its children, and what admission and storage keep it waiting for."""

from __future__ import annotations

from rlrun_operator.kube.resources import BY_KIND, RLRUN
from tests.sim.clock import Clock
from tests.sim.cluster.admission import FOR_GOOD, Refusal
from tests.sim.cluster.api import Api, Ident, Json
from tests.sim.cluster.cluster import Cluster
from tests.sim.invariants.memory import Memory
from tests.sim.operator.process import Process

NAME = "run"
EPOCH = 1_700_000_000.0
LOOK_AND_WRITE_ARE_ONE = False
"""Whether an object of somebody else that appears between a look and the write after it is left alone."""


class Surroundings:
    """The cluster of one run, and the people in it."""

    memory: Memory
    operator: Process

    def __init__(self) -> None:
        self.clock = Clock(EPOCH)
        self.api = Api(self.clock.now)
        self.cluster = Cluster(self.api, self.clock)
        self.late: Process | None = None
        """A process that leads no more, whose last request is still on its way."""
        self.foreign: dict[Ident, Json] = {}
        """Objects of others under names that the run needs."""
        self.lifted: set[str] = set()
        """Marks of what has kept the run waiting and does not any more."""
        self._unlearned: set[str] = set()
        """The same, lifted while a controller rested: its object says truly that it was refused, until it has tried again."""
        self._marks = 0

    @property
    def run(self) -> Json | None:
        return self.api.get(RLRUN.kind, NAME)

    # ---- its children, and objects of others

    def damage(self, child: Json) -> None:
        """Remember a child as it was, before somebody deletes or edits it."""
        ident = (child["kind"], child["metadata"]["name"])
        under_way = self.operator.asked is not None or self.late is not None
        newest = (
            max(self.cluster.newest_attempt(), ((self.run or {}).get("status") or {}).get("attempt", 0)) + under_way
        )
        known = self.memory.damaged.get(ident)
        self.memory.damaged[ident] = (known[0] if known else child, newest)

    def own(self, kind: str, name: str) -> Json | None:
        """An object that is nobody else's."""
        found = self.api.get(kind, name)
        return None if (kind, name) in self.foreign else found

    def make_foreign(self, kind: str, name: str) -> None:
        """Somebody makes an object that has nothing to do with the run. One does not come between a look and the write after it."""
        asked = self.operator.asked
        if asked is not None and asked.writes and not LOOK_AND_WRITE_ARE_ONE and asked.path.endswith(f"/{name}"):
            self.operator.advance()
        if self.api.get(kind, name) is None:
            resource = BY_KIND[kind]
            metadata = {"name": name, "labels": {"app": "mine"}}
            spec: Json = {"template": {"spec": {}}} if kind in ("StatefulSet", "Deployment") else {}
            made = {"apiVersion": resource.api_version, "kind": kind, "metadata": metadata, "spec": spec}
            self.foreign[kind, name] = self.api.add(made)

    def remove_foreign(self) -> None:
        """They give the names free."""
        for kind, name in self.foreign:
            if self.api.get(kind, name) is not None:
                self.api.drop(kind, name)
        self.foreign.clear()

    # ---- what keeps it waiting

    def mark(self) -> str:
        """A word that no other message has."""
        self._marks += 1
        return f"rule-{self._marks:03d}"

    def lift(self, refusals: list[Refusal]) -> None:
        """What was refused is let in from now on."""
        marks = {refusal.mark for refusal in refusals if refusal.sort != FOR_GOOD}  # that is not asked again
        self._unlearned |= marks
        self.learn()
        self.api.refusals = [refusal for refusal in self.api.refusals if refusal not in refusals]

    def learn(self) -> None:
        """Controllers that do not rest have tried again what was refused."""
        if not self.cluster.idle:
            self.lifted |= self._unlearned
            self._unlearned.clear()

    def unbind(self) -> None:
        """Nothing makes volumes, for a reason that it had not before."""
        self.lifted.add(self.cluster.pool)
        self.cluster.binds, self.cluster.pool = False, self.mark()
