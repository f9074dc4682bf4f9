"""Limits that an installation sets on the Kubernetes fields of runs.

Without them the right to create RLRuns would include the right to create pods with any account: docs/security.md, docs/decisions/0036.
"""

from rlrun_operator.restrictions.refusals import find_refusals, refused_claim
from rlrun_operator.restrictions.run_policy import ANY_ADDRESS, Installation, RunPolicy

__all__ = ["ANY_ADDRESS", "Installation", "RunPolicy", "find_refusals", "refused_claim"]
