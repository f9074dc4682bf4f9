"""API responses about running, ended and damaged runs in folders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlrun.inspect.folder_reader import read_folder
from rlrun.inspect.gpu_cost import of_folder
from rlrun.inspect.why import explain_run
from rlrun.runtime.printable import escape_controls
from rlrun.ui.static_files import StaticFiles
from tests.support.made_runs import Client, Folder, client, made, metrics_line, rollout


@pytest.fixture
def run(tmp_path: Path) -> Folder:
    return made(tmp_path / "runs" / "demo")


@pytest.fixture
def asked(run: Folder, static: StaticFiles) -> Client:
    return client(run.root.parent, static=static)[0]


def test_run_list_contains_all_runs_with_state(run: Folder, asked: Client) -> None:
    made(run.root.parent / "other", steps=20).ends()
    run.lives()
    found = asked.json("/api/runs")
    assert [(row["name"], row["phase"], row["progress"]["step"]) for row in found["runs"]] == [
        ("demo", "Running", 10),
        ("other", "Complete", 20),
    ]
    assert found["runs"][0]["progress"]["totalSteps"] == 20
    assert asked.json(f"/api/runs/{found['runs'][1]['id']}")["run"]["name"] == "other"


def test_folder_without_runs_gives_empty_list(tmp_path: Path, static: StaticFiles) -> None:
    assert client(tmp_path, static=static)[0].json("/api/runs")["runs"] == []


def test_run_response_matches_rlrun_why(run: Folder, asked: Client) -> None:
    run.lives()
    found = asked.json(f"/api/runs/{run.id}")
    assert found["wait"]["text"] == "trainer: training step 11"
    seen = read_folder(run.root, 0)
    assert found["why"]["headline"] == explain_run(seen, 0).headline
    assert found["why"]["now"][0]["what"] == "the next step waits for the trainer"
    assert (found["firstStep"], found["lastStep"]) == (1, 10)
    assert found["attempts"] == [{"attempt": 1, "firstStep": 1, "lastStep": 10}]
    assert "eval/math/reward/mean" in found["metrics"]


def test_run_response_matches_rlrun_cost(run: Folder, asked: Client) -> None:
    told = asked.json(f"/api/runs/{run.id}")["cost"]
    account = of_folder(run.root, 0)
    assert {one["use"]: one["seconds"] for one in told["uses"]} == account.seconds_by_use()
    assert account.seconds > 0
    assert (told["gpus"], told["hours"]) == (False, pytest.approx(account.hours))


def test_failure_response_contains_cause(run: Folder, asked: Client) -> None:
    error = {"exit_code": 65, "message": "spec.data: there is no such file"}
    run.write("logs/attempt_0001/trainer/error.json", error)
    failures = asked.json(f"/api/runs/{run.id}")["failures"]
    assert [(one["attempt"], one["role"], one["exitCode"], one["reason"]) for one in failures] == [
        (1, "trainer", 65, "DataError")
    ]


def test_history_response_contains_changed_configuration(run: Folder, asked: Client) -> None:
    run.began(1, 0)
    run.began(2, 6, max_steps=40, api_key="opensesame2")
    told = asked.json(f"/api/runs/{run.id}/history")
    assert told["said"] == "Edited once in 2 attempts."
    (edit,) = told["edits"]
    assert (edit["attempt"], edit["firstStep"], edit["started"]) == (2, 7, "2023-11-14T22:13:22Z")
    assert edit["changes"] == [{"field": "max_steps", "before": "20", "after": "40"}]


def test_unedited_run_is_reported_as_never_edited(run: Folder, asked: Client) -> None:
    told = asked.json(f"/api/runs/{run.id}/history")
    assert told == {"said": "Never edited: the run has had one attempt.", "edits": []}


def test_fork_and_origin_link_to_each_other(run: Folder, asked: Client) -> None:
    run.began(1, 0)
    fork = made(run.root.parent / "fork", uid="v")
    fork.began(1, 0, uid="v")
    fork.forked(run, 6, "trainer.optimizer.lr 1e-05 -> 2e-05", 'orchestrator.env [{"a": "opensesame3"}] -> []')
    secret = {"field": "orchestrator.env", "before": "<hidden>", "after": "<hidden>"}
    changes = [{"field": "trainer.optimizer.lr", "before": "1e-05", "after": "2e-05"}, secret]
    told = asked.json(f"/api/runs/{fork.id}/lineage")
    assert told["forks"] == []
    origin = {"id": run.id, "run": "demo", "step": 6, "attempt": 1, "folder": str(run.root), "changes": changes}
    assert told["origin"] == origin
    told = asked.json(f"/api/runs/{run.id}/lineage")
    assert told["origin"] is None
    assert told["forks"] == [{"id": fork.id, "label": "fork", "step": 6, "changes": changes}]


def test_missing_origin_has_no_link(run: Folder, asked: Client) -> None:
    run.forked(Folder(run.root.parent / "gone"), 6)
    assert asked.json(f"/api/runs/{run.id}/lineage")["origin"]["id"] is None


def test_curves_are_cut_smoothed_and_thinned(run: Folder, asked: Client) -> None:
    path = f"/api/runs/{run.id}/curves"
    (found,) = asked.json(path, metric="reward/mean", first=3, last=5, smooth=2)["curves"]
    assert (found["steps"], found["values"]) == ([3, 4, 5], pytest.approx([0.03, 0.04, 0.05]))
    assert (found["meanSteps"], found["means"]) == ([3, 4, 5], pytest.approx([0.03, 0.035, 0.045]))
    (held_out, none) = asked.json(path, metric=["eval/math/reward/mean", "nothing"])["curves"]
    assert (held_out["steps"], none["steps"]) == ([5, 10], [])
    assert len(asked.json(path, metric="reward/mean", points=4)["curves"][0]["steps"]) <= 4
    assert asked.json(path, metric="reward/mean", points=4)["curves"][0]["measured"] == 10


def test_invalid_metric_value_leaves_a_gap(run: Folder, asked: Client) -> None:
    run.write("metrics.jsonl", '{"step": 1, "loss": 1}\n{"step": 2, "loss": NaN}\n{"step": 3, "loss": Infinity}\n')
    run.lines(
        "metrics.jsonl", [{"step": 4, "loss": 10**400}, {"step": 5, "loss": True}, {"step": 6, "loss": 2}], more=True
    )
    (found,) = asked.json(f"/api/runs/{run.id}/curves", metric="loss")["curves"]
    assert (found["steps"], found["values"]) == ([1, 6], [1.0, 2.0])


def test_retrained_steps_replace_earlier_ones(run: Folder, asked: Client) -> None:
    path = f"/api/runs/{run.id}"
    assert asked.json(path)["lastStep"] == 10
    again = [metrics_line(step, 2) | {"reward/mean": 9.0} for step in (6, 7)]
    run.lines("metrics.jsonl", again, more=True)
    found = asked.json(path)
    assert found["attempts"] == [
        {"attempt": 1, "firstStep": 1, "lastStep": 5},
        {"attempt": 2, "firstStep": 6, "lastStep": 7},
    ]
    assert asked.json(f"{path}/curves", metric="reward/mean")["curves"][0]["values"][-2:] == [9.0, 9.0]


def test_timeline_parts_add_up_to_steps(run: Folder, asked: Client) -> None:
    found = asked.json(f"/api/runs/{run.id}/timeline", spans=3)
    assert (found["first"], found["last"]) == ([1, 4, 7], [3, 6, 10])
    parts = {one["name"]: one["seconds"] for one in found["parts"]}
    assert parts == {
        "compute": pytest.approx([1.0] * 3),
        "batch": pytest.approx([0.5] * 3),
        "weights": pytest.approx([0.25] * 3),
        "rest": pytest.approx([0.25] * 3),
    }
    assert [one["name"] for one in found["parts"] if one["waits"]] == ["batch"]


def test_staleness_counts_tokens_by_the_age_of_their_policy(run: Folder, asked: Client) -> None:
    found = asked.json(f"/api/runs/{run.id}/staleness", step=3)
    assert found["lags"] == [0, 1]
    assert found["tokens"] == [4 * (6 + 7 + 8 + 9), 16 * 4]


def test_rollouts_are_filtered_sorted_and_paged(run: Folder, asked: Client) -> None:
    path = f"/api/runs/{run.id}/rollouts"
    every = asked.json(path, step=3)
    assert (every["total"], every["chosen"], every["environments"]) == (16, 16, ["code", "math"])
    assert every["rewardMean"] == pytest.approx(sum(range(16)) / 256)
    worst = asked.json(path, step=3, order="worst", limit=2)
    assert [row["reward"] for row in worst["rows"]] == [0.0, 1 / 16]
    best = asked.json(path, step=3, order="best", limit=2, offset=1, environment="math")
    assert [row["reward"] for row in best["rows"]] == [10 / 16, 9 / 16]
    some = asked.json(path, step=3, rewardMin=0.25, rewardMax=0.5, tokensMin=12, order="longest")
    assert [(row["reward"], row["completionTokens"]) for row in some["rows"]] == [(7 / 16, 13), (6 / 16, 12)]
    assert [row["rollout"] for row in asked.json(path, step=3, group=2)["rows"]] == [0, 1, 2, 3]
    assert asked.json(f"/api/runs/{run.id}/traces") == {
        "run": "demo",
        "spans": [[3, 3]],
        "evaluations": [],
    }


def test_rollouts_without_reward_are_sorted_last(run: Folder, asked: Client) -> None:
    rows = [rollout(0, 0, None), {"error": "late", "sample": 1}, rollout(0, 2, 0.5), rollout(0, 3, 0.25)]
    run.lines("traces/step_00000003.jsonl", [row | {"attempt": 1} for row in rows])
    path = f"/api/runs/{run.id}/rollouts"
    for order, rewards in (("worst", [0.25, 0.5]), ("best", [0.5, 0.25])):
        found = asked.json(path, step=3, order=order)["rows"]
        assert [row["reward"] for row in found] == [*rewards, None, None]
        assert found[-1]["error"] == "late"


def test_rollout_response_contains_turns_and_calls(run: Folder, asked: Client) -> None:
    found = asked.json(f"/api/runs/{run.id}/rollouts/5", step=3)
    assert [turn["role"] for turn in found["turns"]] == ["user", "assistant", "tool", "assistant"]
    assert found["turns"][1]["calls"] == [{"name": "add", "arguments": '{"a": 2, "b": 2}'}]
    assert found["row"]["versions"] == [1, 2]
    assert found["measures"] == [{"metric": "exact", "value": 0.0}]


def test_rollout_diff_marks_differences_of_two_rollouts(run: Folder, asked: Client) -> None:
    found = asked.json(f"/api/runs/{run.id}/rollouts/4/diff/6", step=3)
    last = found["turns"][3]
    assert [piece["text"] for piece in last if piece["side"] == "first"] == ["1"]
    assert [piece["text"] for piece in last if piece["side"] == "second"] == ["3"]
    assert "".join(piece["text"] for piece in last if piece["side"] != "second") == "it is 1"


def test_compare_response_contains_curves_and_differences(run: Folder, asked: Client) -> None:
    other = made(run.root.parent / "other", steps=20, max_steps=40)
    found = asked.json("/api/compare", run=[run.id, other.id])
    assert (found["labels"], found["steps"]) == (["demo", "other"], 10)
    assert {"field": "maxSteps", "values": ["20", "40"]} in found["differences"]
    assert next(one for one in found["lastTenth"] if one["metric"] == "reward/mean")["means"] == pytest.approx(
        [0.095, 0.095]
    )


@pytest.mark.parametrize(
    ("path", "query", "status", "said"),
    [
        ("/api/runs/nobody", {}, 404, "the run nobody does not exist"),
        ("/api/runs/RUN/rollouts", {"step": 4}, 404, "the run's folder has no step_00000004.jsonl"),
        ("/api/runs/RUN/rollouts", {}, 404, "set the parameter step or evaluation"),
        ("/api/runs/RUN/rollouts", {"step": 3, "order": "prettiest"}, 422, "order: Input should be 'trace', 'worst'"),
        ("/api/runs/RUN/rollouts", {"step": 3, "limit": 100000}, 422, "limit: "),
        ("/api/runs/RUN/rollouts/99", {"step": 3}, 404, "the trace has no rollout 99"),
        ("/api/runs/RUN/curves", {}, 422, "metric: "),
        ("/api/compare", {"run": "RUN"}, 422, "run: "),
        ("/api/unknown", {}, 404, "the route /api/unknown does not exist"),
    ],
)
def test_invalid_request_gets_one_sentence_error(
    run: Folder, asked: Client, path: str, query: dict[str, object], status: int, said: str
) -> None:
    reply = asked.get(path.replace("RUN", run.id), **query)
    assert (reply.status, said in reply.json["problem"]) == (status, True), reply.body


def test_damaged_files_do_not_crash_server(run: Folder, asked: Client) -> None:
    run.write("run.json", "{torn")
    run.write("launcher.json", "[]")
    run.write("attempts/0001.json", "null")
    run.write("metrics.jsonl", '\x00\n[1]\n{"step": "x"}\n{"step": -5}\n{"step": 1, "reward/mean": 0.5}\n{"torn')
    deep = "[" * 100_000
    run.write("traces/step_00000003.jsonl", f'nonsense\n{deep}\n{{"messages": 5, "versions": [[{{"version": []}}]]}}\n')
    for path in ("", "/manifest", "/timeline", "/traces"):
        asked.json(f"/api/runs/{run.id}{path}") if path != "/manifest" else asked.get(f"/api/runs/{run.id}{path}")
    assert asked.json(f"/api/runs/{run.id}/rollouts", step=3)["total"] == 1
    assert asked.get(f"/api/runs/{run.id}/manifest").status in (200, 500)
    assert json.loads(asked.get("/api/runs").body)["runs"][0]["name"] == "demo"


@pytest.mark.parametrize("hidden", ["\u202e", "\u2066", "\u200b", "\ufeff", "\x1b"])
def test_responses_contain_no_control_characters(tmp_path: Path, static: StaticFiles, hidden: str) -> None:
    evil = f"a{hidden}b"
    plain = escape_controls(evil)
    run = made(tmp_path / "runs" / "demo", name=evil, model={"name": evil})
    rows = [
        rollout(0, m, m, environment=evil, task_id=evil, finish_reason=evil, metrics={evil: 1}, tools=[{"name": evil}],
                messages=[{"role": evil, "content": evil, "tool_calls": [{"name": evil, "arguments": evil}]}])
        for m in (0, 1)
    ]  # fmt: skip
    run.lines("traces/step_00000003.jsonl", [*rows, {"error": evil, "attempt": 1}])
    run.lines("metrics.jsonl", [{"step": 1, evil: 1.0}, {"step": 2, evil: 2.0}])
    run.write("logs/attempt_0001/trainer/error.json", {"exit_code": 65, "message": evil})
    run.forked(Folder(tmp_path / "runs" / "origin"), 1, f"{evil} 1 -> {evil}")
    run.ends("Failed")
    asked, _ = client(run.root.parent, static=static)
    base, one = f"/api/runs/{run.id}", {"step": 3}
    answers = [
        asked.get("/api/runs"),
        asked.get(base),
        asked.get(f"{base}/curves", metric=plain),
        asked.get(f"/api/{evil}"),
    ]
    answers += [
        asked.get(f"{base}/{name}") for name in ("manifest", "history", "lineage", "traces", "timeline", "sparkline")
    ]
    answers += [
        asked.get(f"{base}/rollouts{more}", **one) for more in ("", "/0", "/0/tokens", "/0/reasons", "/0/diff/1")
    ]
    for answer in answers:
        assert hidden not in answer.body.decode(), answer.body
        assert json.dumps(hidden)[1:-1].encode() not in answer.body.replace(b"\\\\", b"")
    assert answers[2].json["curves"][0]["values"] == [1.0, 2.0], "a metric is asked for by the name that is shown"
    filtered = asked.json(f"{base}/rollouts", step=3, environment=plain)
    assert (filtered["chosen"], plain in filtered["environments"]) == (2, True)
