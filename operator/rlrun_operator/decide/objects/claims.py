"""Owner of the run's own claim: the run until the claim is bound; after that the claim has no owner, unless `storage.whenDeleted` is
Delete."""

from __future__ import annotations

from rlrun_operator.decide.reading.children import is_ending, uid_of
from rlrun_operator.decide.snapshot import RunSnapshot
from rlrun_operator.state import Disown


def disown_claim(run: RunSnapshot) -> Disown | None:
    """Return the write that removes the run from the owners of a bound claim; None if it has no owner, or is deleted with the run."""
    claim, spec = run.claim, run.spec
    if claim is None or spec is None or not run.wanted.own_claim or is_ending(claim):
        return None
    owners = claim["metadata"].get("ownerReferences") or ()
    others = tuple(owner for owner in owners if owner.get("uid") != run.metadata["uid"])
    is_bound = (claim.get("status") or {}).get("phase") == "Bound"
    if not is_bound or len(others) == len(owners) or spec.storage.when_deleted == "Delete":
        return None
    return Disown(run.wanted.claim, uid_of(claim), claim["metadata"].get("resourceVersion"), others)
