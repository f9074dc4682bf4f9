"""Weight updates during an answer: every token is labeled with the version that sampled it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.e2e.local.local_run import LocalRun, quickstart

STEPS = 10
BATCH = 16
ASYNC_LEVEL = 3

pytestmark = pytest.mark.full


def test_long_answers_contain_tokens_of_two_versions(new_run: Callable[..., LocalRun]) -> None:
    run = new_run(
        quickstart(
            maxSteps=STEPS,
            seqLen=448,
            model={"tiny": {"maxLength": 448}, "dtype": "float32"},
            sampling={
                "maxTokens": 400,
                "temperature": 0.05,
            },  # random weights at a low temperature: most answers reach their limit
            algorithm={"maxAsyncLevel": ASYNC_LEVEL, "maxOffPolicySteps": ASYNC_LEVEL + 1},
            orchestrator={
                "batchSize": BATCH,
                "maxConcurrency": 8,
            },  # the trainer waits for answers, so an update occurs during one
            evaluation=None,
            checkpoint={"enabled": False},
        )
    )
    run.run()
    rollouts = run.traces()
    assert len(rollouts) == STEPS * BATCH
    spans = [[span["version"] for sequence in rollout["versions"] for span in sequence] for rollout in rollouts]
    assert all(versions == sorted(set(versions)) for versions in spans)
    assert any(len(versions) >= 2 for versions in spans), "no answer spans two versions"
    for rollout, versions in zip(rollouts, spans, strict=True):
        step = rollout["step"]
        assert versions[0] >= rollout["dispatch_version"]
        assert versions[-1] <= step - 1
        assert rollout["dispatch_version"] >= step - 1 - (ASYNC_LEVEL + 1)
