"""Step summary in the log of the orchestrator."""

from __future__ import annotations

from rlrun.orchestrator.progress.step_metrics import step_line


def test_step_line_contains_known_metrics() -> None:
    line = {"step": 12, "attempt": 1, "reward/mean": 0.61234, "mismatch_kl": 2e-5, "time/step": 0.5, "loss": 1.0}
    assert step_line(line) == "step 12: reward 0.612, mismatch_kl 2.0e-05, step time 0.50"


def test_held_out_rewards_name_their_environment() -> None:
    assert step_line({"step": 0, "eval/reverse-text/reward/mean": 0.5}) == "step 0: held-out reverse-text 0.500"


def test_step_line_without_reward_contains_loss() -> None:
    line = {"step": 50, "loss": 1.25, "validation/loss": 1.5, "grad_norm": 0.5}
    assert step_line(line) == "step 50: loss 1.2500, validation loss 1.5000, grad_norm 0.5"


def test_step_line_of_partial_evaluation_counts_missing_answers() -> None:
    counts = {"eval/e/answers": 3.0, "eval/e/errors": 1.0, "eval/e/timeouts": 2.0}
    line = {"step": 4} | counts | {"eval/e/reward/mean_all": 0.25, "eval/e/reward/mean": 0.5}
    expected = "held-out e 0.500 (partial: 3 of 6 answers in time, 1 failed, 0.250 with the rest as 0)"
    assert step_line(line) == f"step 4: {expected}"


def test_step_line_shows_evaluation_without_answers() -> None:
    line = {
        "step": 4,
        "eval/e/answers": 0.0,
        "eval/e/errors": 6.0,
        "eval/e/timeouts": 0.0,
        "eval/e/reward/mean_all": 0.0,
    }
    expected = "held-out e without an answer (partial: 0 of 6 answers in time, 6 failed, 0.000 with the rest as 0)"
    assert step_line(line) == f"step 4: {expected}"
