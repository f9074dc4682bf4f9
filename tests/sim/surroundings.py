"""Surroundings of a run: cluster, foreign objects, damaged children, and waits for admission and storage."""

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
"""Whether a foreign object that appears between a read and the following write is left alone."""


class Surroundings:
    """The cluster of one run and its users."""

    memory: Memory
    operator: Process

    def __init__(self) -> None:
        self.clock = Clock(EPOCH)
        self.api = Api(self.clock.now)
        self.cluster = Cluster(self.api, self.clock)
        self.late: Process | None = None
        """Process that is no longer the leader but whose last request is still in transit."""
        self.foreign: dict[Ident, Json] = {}
        """Foreign objects with names that the run needs."""
        self.lifted: set[str] = set()
        """Marks of waits that are over."""
        self._unlearned: set[str] = set()
        """Marks of waits that ended while a controller was idle: its object correctly reports the refusal until the
        next try.
        """
        self._marks = 0

    @property
    def run(self) -> Json | None:
        return self.api.get(RLRUN.kind, NAME)

    # ---- children and foreign objects

    def damage(self, child: Json) -> None:
        """Record a child before it is deleted or edited."""
        ident = (child["kind"], child["metadata"]["name"])
        under_way = self.operator.asked is not None or self.late is not None
        newest = (
            max(self.cluster.newest_attempt(), ((self.run or {}).get("status") or {}).get("attempt", 0)) + under_way
        )
        known = self.memory.damaged.get(ident)
        self.memory.damaged[ident] = (known[0] if known else child, newest)

    def own(self, kind: str, name: str) -> Json | None:
        """Return an object unless it is a foreign one."""
        found = self.api.get(kind, name)
        return None if (kind, name) in self.foreign else found

    def make_foreign(self, kind: str, name: str) -> None:
        """Create an object unrelated to the run, except between a read and the following write."""
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
        """Delete the foreign objects."""
        for kind, name in self.foreign:
            if self.api.get(kind, name) is not None:
                self.api.drop(kind, name)
        self.foreign.clear()

    # ---- causes of waits

    def mark(self) -> str:
        """Return a word that occurs in no other message."""
        self._marks += 1
        return f"rule-{self._marks:03d}"

    def lift(self, refusals: list[Refusal]) -> None:
        """Lift these refusals."""
        marks = {refusal.mark for refusal in refusals if refusal.sort != FOR_GOOD}  # these are not tried again
        self._unlearned |= marks
        self.learn()
        self.api.refusals = [refusal for refusal in self.api.refusals if refusal not in refusals]

    def learn(self) -> None:
        """Let controllers that are not idle retry the refused objects."""
        if not self.cluster.idle:
            self.lifted |= self._unlearned
            self._unlearned.clear()

    def unbind(self) -> None:
        """Stop the provisioning of volumes with a new reason."""
        self.lifted.add(self.cluster.pool)
        self.cluster.binds, self.cluster.pool = False, self.mark()
