"""Limits that an installation sets on what runs may ask of Kubernetes.

`create rlruns` would else be `create pods` with any account: see docs/security.md and docs/decisions/0036.
"""

from rlrun_operator.restrictions.refusals import find_refusals, refused_claim
from rlrun_operator.restrictions.run_policy import ANY_ADDRESS, Installation, RunPolicy

__all__ = ["ANY_ADDRESS", "Installation", "RunPolicy", "find_refusals", "refused_claim"]
