"""Reported waits of a run in stable words, and the moves that count as progress."""

from __future__ import annotations

from pathlib import Path

from orch_simulation import make_config

from rlrun.orchestrator.progress.run_snapshot import Activity
from rlrun.orchestrator.trainer.shared_trainer import Connection
from rlrun.orchestrator.trainer.trainer_client import Since, Waiting, of_trainer
from rlrun.protocol.messages.trainer_channel import RankState, TrainerState

NOON = 1_700_000_000.0  # 22:13:20Z


def trainer(phase: str = "training", part: int = 0, ranks: list[RankState] | None = None) -> TrainerState:
    return TrainerState.model_validate(
        {
            "attempt": 1,
            "base_step": 0,
            "step": 11,
            "phase": phase,
            "phase_since": NOON,
            "last_event": 3,
            "part": part,
            "ranks": ranks or [],
        }
    )


def rank(number: int, phase: str, part: int = 0) -> RankState:
    return RankState.model_validate({"rank": number, "phase": phase, "step": 12, "part": part, "since": NOON + 4})


def test_trainer_wait_shows_phase_and_micro_batch() -> None:
    told = of_trainer(trainer("waiting_for_turn"), 12, NOON + 60)
    assert (told.role, told.phase, told.since) == ("trainer", "waiting for turn, step 12", NOON)
    assert str(told) == "trainer: waiting for turn, step 12 since 22:13:20Z"
    assert str(of_trainer(trainer(part=3), 12, NOON)) == "trainer: training, step 12 since 22:13:20Z; micro-batch 3"


def test_ranks_in_another_phase_are_named() -> None:
    ranks = [rank(1, "training", 3), rank(2, "training", 2), rank(3, "saving")]
    state = trainer(part=3, ranks=ranks)
    assert of_trainer(state, 12, NOON + 4).detail == "micro-batch 3", "they are on their way"
    told = of_trainer(state, 12, NOON + 60).detail
    assert told == (
        "micro-batch 3, rank 2: training, step 12 micro-batch 2 since 22:13:24Z, rank 3: saving, step 12 since 22:13:24Z"
    )
    turn = trainer("waiting_for_turn", ranks=[rank(1, "waiting_for_batch")])
    assert of_trainer(turn, 12, NOON + 60).detail == "", "rank 0 alone knows of turns"
    many = trainer(ranks=[rank(number, "saving") for number in range(1, 64)])
    assert of_trainer(many, 12, NOON + 60).detail.endswith("rank 4: saving, step 12 since 22:13:24Z, 59 more ranks")


def test_wait_restarts_when_its_description_changes() -> None:
    now = [100.0]
    since = Since(lambda: now[0])
    assert since.waiting("orchestrator", "rollouts for step 1", "0 of 8 done") == Waiting(
        "orchestrator", "rollouts for step 1", 100.0, "0 of 8 done"
    )
    now[0] = 130.0
    assert since.waiting("orchestrator", "rollouts for step 1", "4 of 8 done").since == 100.0
    assert since.waiting("inference", "weights of version 1").since == 130.0
    now[0] = 140.0
    assert since.waiting("orchestrator", "rollouts for step 1").since == 140.0


def test_only_forward_moves_count_as_activity() -> None:
    activity = Activity()
    first = activity.update(3, accepted=4, version=3)
    assert activity.update(3, accepted=4, version=3) == first
    more = activity.update(3, accepted=5, version=3)
    assert more > first
    for accepted, version in (
        (4, None),
        (5, 3),
        (0, 3),
        (5, 2),
    ):  # groups become too old, and an engine disconnects and returns
        assert activity.update(3, accepted=accepted, version=version) == more
    assert activity.update(3, accepted=5, version=3, trained=0) > more
    next_step = activity.update(4, accepted=0)
    assert next_step > more, "a step counts itself, and all marks anew"
    assert activity.update(4, accepted=1) > next_step


def test_start_is_described_by_the_trainer_once_connected(tmp_path: Path, tokenizer_folder: Path) -> None:
    connection, since = Connection(make_config(tmp_path, tokenizer_folder), "key", attempt=1), Since(lambda: NOON)
    told = str(connection.waits(since))
    assert (
        told
        == f"trainer: starting since 22:13:20Z; {connection.waiting} has not answered yet; it is starting or loading"
    )
    connection._client.state = trainer("loading")
    assert str(connection.waits(since)) == "trainer: loading since 22:13:20Z"
