"""Refusals by quotas and LimitRanges, with reason and fix."""

from __future__ import annotations

import pytest

from rlrun_operator.status.claim_messages import limit_refusal, limit_was_filled_in

INVALID = (
    'Pod "a-orchestrator-1" is invalid: spec.containers[1].resources.requests: Invalid value: "1Gi": '
    "must be less than or equal to memory limit of 512Mi"
)


@pytest.mark.parametrize(
    ("text", "reason", "words"),
    [
        (
            'pods "x" is forbidden: exceeded quota: q, requested: pods=1, used: pods=2, limited: pods=2',
            "QuotaExceeded",
            "raised",
        ),
        (
            'pods "x" is forbidden: failed quota: q: must specify limits.memory',
            "QuotaExceeded",
            "set the resources it names in ROLE",
        ),
        ("minimum cpu usage per Container is 2, but request is 1", "PodsRefused", "change ROLE"),
        (
            "memory max limit to request ratio per Container is 1, but provided ratio is 2.0",
            "PodsRefused",
            "LimitRange",
        ),
        (INVALID, "PodsRefused", "change ROLE"),
    ],
)
def test_limit_refusal_has_reason_and_fix(text: str, reason: str, words: str) -> None:
    say = limit_refusal("trainer", text, "ROLE")
    assert say is not None
    assert (say.reason, text in say.message, words in say.message) == (reason, True, True)


def test_unrelated_refusal_is_not_a_limit_refusal() -> None:
    assert limit_refusal("trainer", 'violates PodSecurity "restricted:latest"', "ROLE") is None


def test_limit_set_by_the_pod_was_not_filled_in() -> None:
    """A limit in the manifest is an error of the manifest, and waiting does not help."""

    def pod(limits: dict[str, str]) -> dict[str, object]:
        return {"kind": "Pod", "spec": {"containers": [{}, {"resources": {"limits": limits}}]}}

    assert limit_was_filled_in(INVALID, pod({"cpu": "1"}))
    assert not limit_was_filled_in(INVALID, pod({"memory": "512Mi"}))
    assert not limit_was_filled_in(INVALID, {**pod({}), "kind": "StatefulSet"})
    assert not limit_was_filled_in("something else", pod({}))
