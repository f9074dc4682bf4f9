"""Commands on runs of a cluster, with recorded responses of the API server."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlrun.cli import kubectl_plugin
from rlrun.cli.main import main
from rlrun.inspect import cluster_reader
from rlrun.inspect.kubectl import Answer
from rlrun.runtime import exit_codes
from tests.unit.inspect.broken import BROKEN, condition, failure, restarting, run
from tests.unit.inspect.recorded import PODS, Recorded, Use, of_run, pod

STORAGE = {"storage": {"claimName": "a-data", "size": "2Ti", "path": "/data/a"}}


def test_get_lists_runs_with_reasons_and_guests_below_hosts(use: Use, capsys: pytest.CaptureFixture[str]) -> None:
    guest = run("Pending", condition("HostAvailable", "False", "HostNotReady", "x"))
    guest["metadata"]["name"], guest["spec"]["trainer"] = "g", {"sharedWith": "z"}
    host = run("Running", trainerReady="1/1")
    host["metadata"]["name"] = "z"
    cluster = use(Recorded(("get rlruns.rlrun.io", {"items": [guest, host]})))
    assert main(["get", "-n", "team", "--context", "lab"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["NAME", "z", "└─"]
    assert lines[1].split() == [
        "z",
        "Running",
        "7/100",
        "0.500",
        "1/1",
        "–",
        "0",
        "–",
        lines[1].split()[-2],
        "Training",
    ]
    assert lines[2].endswith("HostNotReady")
    assert cluster.asked[0][1:3] == ["--namespace=team", "--context=lab"]


def test_get_of_all_namespaces_and_as_documents(use: Use, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = use(of_run(run("Running")))
    assert main(["get", "-A"]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("team")
    assert "--all-namespaces" in cluster.asked[0]
    assert main(["get", "-n", "team", "-o", "json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["name"], found["progress"]["totalSteps"], found["restartsCounted"]) == ("a", 100, 0)
    assert main(["get", "-n", "team", "-o", "name"]) == 0
    assert capsys.readouterr().out == "a\n"
    assert main(["get", "a", "-o", "wide"]) == 0
    assert "STALENESS" in capsys.readouterr().out


def test_get_sorts_runs_and_lists_unknown_values_last(use: Use, capsys: pytest.CaptureFixture[str]) -> None:
    def named(name: str, phase: str, created: str, **progress: Any) -> dict[str, Any]:
        found = run(phase)
        found["metadata"] |= {"name": name, "creationTimestamp": created}
        found["status"]["progress"] = progress
        return found

    runs = [
        named("b", "Running", "2026-09-01T00:00:00Z", step=9, reward=0.25),
        named("c", "Pending", "2026-09-03T00:00:00Z"),
        named("a", "Complete", "2026-09-02T00:00:00Z", step=5, reward=0.75),
    ]
    runs[0]["status"]["restarts"] = 1
    use(Recorded(("get rlruns.rlrun.io", {"items": runs})))

    def listed(*words: str) -> list[str]:
        assert main(["get", "-n", "team", "-o", "name", *words]) == 0
        return capsys.readouterr().out.split()

    assert listed("--sort", "name") == ["a", "b", "c"]
    assert listed("--sort", "phase") == ["a", "c", "b"]
    assert listed("--sort", "age") == ["c", "a", "b"]
    assert listed("--sort", "step") == ["b", "a", "c"]
    assert listed("--sort", "reward") == ["a", "b", "c"]
    assert listed("--sort", "restarts") == ["b", "a", "c"], "equal values keep the order of names"
    assert main(["get", "-n", "team", "--sort", "reward"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["NAME", "a", "b", "c"]


def test_get_refuses_an_unknown_field_to_sort_by(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["get", "--sort", "rewards"]) == exit_codes.USAGE
    assert "argument --sort: invalid choice: 'rewards'" in capsys.readouterr().err


def test_get_of_one_run_shows_its_pods(use: Use, capsys: pytest.CaptureFixture[str]) -> None:
    use(of_run(run("Starting"), pods=PODS))
    assert main(["get", "a"]) == 0
    assert "a-trainer-1: ImagePullBackOff, not ready, on node-7" in capsys.readouterr().out


def test_status_and_why_agree_as_documents(use: Use, capsys: pytest.CaptureFixture[str]) -> None:
    use(
        of_run(
            restarting(failure("OOMKilled", "too much", code=137), restarts=1, restartsCountedTowardsMax=1), pods=PODS
        )
    )
    assert main(["why", "a", "-o", "yaml"]) == 0
    told = yaml.safe_load(capsys.readouterr().out)
    assert told["toDo"][0] == (
        "Increase trainer.resources.limits.memory; for a trainer, decreasing trainer.microBatchTokens also helps."
    ), "the cause comes before what follows from it"
    assert main(["status", "a"]) == 0
    text = capsys.readouterr().out
    assert "1, 1 counted of at most 3" in text
    assert "OOMKilled of a-trainer-0 on node-7" in text


def test_container_that_runs_again_is_shown_as_running() -> None:
    end = {"terminated": {"reason": "Error", "exitCode": 1}}
    again = pod("a-inference-x", "inference", restartCount=1, lastState=end)
    waits = pod(
        "a-trainer-0", "trainer", restartCount=1, lastState=end, state={"waiting": {"reason": "CrashLoopBackOff"}}
    )
    ended = pod("a-orchestrator-1", "orchestrator", state=end)
    states = {process.name: process.state for process in cluster_reader._read_processes([again, waits, ended])}
    assert states == {"a-inference-x": "Running", "a-trainer-0": "CrashLoopBackOff", "a-orchestrator-1": "Error (1)"}


def test_status_explains_changed_number_of_pods(use: Use, capsys: pytest.CaptureFixture[str]) -> None:
    size = {
        "reason": "4 to 3 pods: 1 of 4 pods found no node within 300 s",
        "waitingOn": "the next complete checkpoint",
    }
    use(of_run(run("Running", trainer={"desired": 3, "ready": 3, "size": 3} | size)))
    assert main(["status", "a"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "trainer 3/3" in text
    assert (
        "trainer 4 to 3 pods: 1 of 4 pods found no node within 300 s; another size waits for: the next complete checkpoint"
        in text
    )


def test_status_counts_lost_spot_engines(use: Use, capsys: pytest.CaptureFixture[str]) -> None:
    spot = {"desired": 3, "ready": 1, "lost": 2, "lastLoss": "pod a-inference-spot-x on node n: DeletionByTaintManager"}
    use(of_run(run("Running", inference={"desired": 4, "ready": 2, "spot": spot})))
    assert main(["status", "a"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert (
        "1 of 3 spot engines are ready, 2 lost so far, the last: pod a-inference-spot-x on node n: "
        "DeletionByTaintManager"
    ) in text


def test_forbidden_events_are_reported_with_remaining_explanation(use: Use, capsys: pytest.CaptureFixture[str]) -> None:
    forbidden = Answer(
        1, "", 'Error from server (Forbidden): events is forbidden: User "u" cannot list resource "events"'
    )
    use(of_run(BROKEN["quota"][0], ("get events", forbidden)))
    assert main(["why", "a"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "QuotaExceeded" in text
    assert (
        'events could not be read: kubectl get failed: (Forbidden): events is forbidden: User "u" cannot list' in text
    )


@pytest.mark.parametrize(
    ("said", "code", "expected"),
    [
        (
            'Error from server (NotFound): rlruns.rlrun.io "a" not found',
            exit_codes.USAGE,
            "there is no run a in this namespace",
        ),
        (
            'error: the server doesn\'t have a resource type "rlruns"',
            exit_codes.UNAVAILABLE,
            "rlrun crd | kubectl apply",
        ),
        (
            "The connection to the server 10.0.0.1:6443 was refused - did you specify",
            69,
            "the API server 10.0.0.1:6443 does not respond",
        ),
        (
            'The RLRun "a" is invalid: \n* spec: maxSteps may only grow\n* spec: seqLen is frozen',
            exit_codes.CONFIGURATION,
            "the API server refused the change: * spec: maxSteps may only grow * spec: seqLen is frozen",
        ),
        (
            "The rlruns \"a\" is invalid: : ValidatingAdmissionPolicy 'rlruns.rlrun.io' with binding 'rlruns.rlrun.io' "
            "denied request: spec: frozen since attempt 1 began",
            exit_codes.CONFIGURATION,
            "the API server refused the change: spec: frozen since attempt 1 began",
        ),
        ('error: context "x" does not exist', exit_codes.USAGE, "--context: there is no context x"),
        (
            "I0101 00:00:00.0 noise\nerror: \x1b[31msomething else",
            exit_codes.UNAVAILABLE,
            "kubectl get failed: \\x1b[31msomething else",
        ),
    ],
)
def test_cluster_error_is_printed_on_one_line(
    use: Use, capsys: pytest.CaptureFixture[str], said: str, code: int, expected: str
) -> None:
    use(Recorded(("get", Answer(1, "", said))))
    assert main(["why", "a"]) == code
    err = capsys.readouterr().err
    assert expected in err
    assert err.count("\n") == 1


def patched(cluster: Recorded) -> list[Any]:
    """Return the patches that were applied without a dry run."""
    real = [words for words in cluster.asked if "patch" in words and "--dry-run=server" not in words]
    return [
        json.loads(word.removeprefix("--patch=")) for words in real for word in words if word.startswith("--patch=")
    ]


@pytest.mark.parametrize(
    ("words", "spec"),
    [
        (["suspend", "a"], {"suspend": True}),
        (["resume", "a"], {"suspend": False}),
        (["scale", "a", "--inference", "6", "--min-available", "2"], {"inference": {"replicas": 6, "minAvailable": 2}}),
        (
            ["set", "a", "maxSteps=200", "spec.inference.min-available=1"],
            {"maxSteps": 200, "inference": {"minAvailable": 1}},
        ),
    ],
)
def test_change_is_validated_by_dry_run_before_patch(use: Use, words: list[str], spec: Any) -> None:
    cluster = use(of_run(run("Running"), ("patch", {"spec": spec})))
    assert main(words) == 0
    assert patched(cluster) == [{"spec": spec}]
    assert "--dry-run=server" in cluster.asked[0]
    dry = use(of_run(run("Running"), ("patch", {"spec": spec})))
    assert main([*words, "--dry-run"]) == 0
    assert patched(dry) == []


def test_unknown_field_is_refused_without_patch(use: Use, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = use(of_run(run("Running"), ("patch", {"spec": {"inference": {"replicas": 4}}})))
    assert main(["set", "a", "inference.replica=6"]) == exit_codes.USAGE
    assert "spec.inference.replica: unknown field of the RLRun" in capsys.readouterr().err
    assert patched(cluster) == []


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("maxSteps", "got 'maxSteps', expected field=value"),
        ("environments.0.ratio=2", "0 is an item of a list"),
        ("a..b=1", "expected field=value"),
        ("x[0]=1", "'x[0]' is not a field name"),
        ("maxSteps={", "the value is not valid YAML"),
    ],
)
def test_malformed_assignment_is_refused_with_explanation(
    use: Use, capsys: pytest.CaptureFixture[str], word: str, expected: str
) -> None:
    use(Recorded())
    assert main(["set", "a", word]) == exit_codes.USAGE
    assert expected in capsys.readouterr().err


def test_restart_annotates_failed_run_and_refuses_complete_run(use: Use, capsys: pytest.CaptureFixture[str]) -> None:
    key = "rlrun.io/restart-requested-at"
    failed = use(of_run(run("Failed"), ("patch", {"metadata": {"annotations": {key: "x"}}})))
    assert main(["restart", "a"]) == 0
    (made,) = patched(failed)
    assert made["metadata"]["annotations"][key].endswith("Z")
    complete = use(of_run(run("Complete")))
    assert main(["restart", "a"]) == exit_codes.USAGE
    assert main(["restart", "a", "-n", "b team"]) == exit_codes.USAGE
    told = capsys.readouterr().err
    assert told.splitlines()[0].endswith("rlrun set a maxSteps=N")
    assert told.splitlines()[1].endswith("rlrun set a maxSteps=N -n 'b team'")
    assert patched(complete) == []


@pytest.mark.parametrize(
    ("words", "pods"),
    [
        ([], ["a-orchestrator-1"]),
        (["--role", "trainer"], ["a-trainer-0", "a-trainer-1"]),
        (["--role", "trainer", "--rank", "1"], ["a-trainer-1"]),
        (["--role", "inference", "--attempt", "2"], ["a-inference-x"]),
        (["--role", "all"], ["a-trainer-0", "a-trainer-1", "a-inference-x", "a-orchestrator-1"]),
    ],
)
def test_logs_show_only_selected_pods(use: Use, words: list[str], pods: list[str]) -> None:
    cluster = use(of_run(run("Running", **STORAGE), pods=PODS))
    assert main(["logs", "a", *words, "--tail", "5", "--previous"]) == 0
    assert [shown[4] for shown in cluster.shown] == pods
    assert all({"--tail=5", "--previous"} <= set(shown) for shown in cluster.shown)


def test_logs_of_several_pods_are_followed_together(use: Use) -> None:
    cluster = use(of_run(run("Running", **STORAGE), pods=PODS))
    assert main(["logs", "a", "--role", "trainer", "-f"]) == 0
    (shown,) = cluster.shown
    assert "rlrun.io/run=a,rlrun.io/role=trainer" in shown
    assert "--follow" in shown


def test_followed_logs_of_one_rank_need_one_role(use: Use, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = use(of_run(run("Running", **STORAGE), pods=PODS))
    assert main(["logs", "a", "--role", "all", "--rank", "0", "-f"]) == 64
    assert (
        "--rank: got 0 with --follow and 3 roles; write --role trainer or --role inference" in capsys.readouterr().err
    )
    assert cluster.shown == []
    assert main(["logs", "a", "--role", "trainer", "--rank", "0", "-f"]) == 0
    assert "a-trainer-0" in cluster.shown[0]


def test_logs_of_ended_attempt_come_from_volume(use: Use, capsys: pytest.CaptureFixture[str]) -> None:
    later = [pod("a-trainer-0", "trainer", attempt=2), pod("a-orchestrator-2", "orchestrator", attempt=2)]
    cluster = use(of_run(run("Running", attempt=2, **STORAGE), pods=later))
    assert main(["logs", "a", "--role", "trainer", "--attempt", "1"]) == 0
    (shown,) = cluster.shown
    assert shown[1:5] == ["exec", "--namespace", "team", "a-orchestrator-2"]
    assert shown[-2:] == ["/data/a/logs/attempt_0001/trainer", "100"]
    use(of_run(run("Restarting", attempt=2, **STORAGE)))
    assert main(["logs", "a", "--attempt", "1"]) == exit_codes.USAGE
    assert "logs/attempt_0001" in capsys.readouterr().err


ROWS = "".join(
    json.dumps(
        {
            "step": 3,
            "attempt": attempt,
            "reward": reward,
            "environment": "e",
            "messages": [{"role": "user", "content": "q"}],
        }
    )
    + "\n"
    for attempt, reward in ((1, 0.9), (2, 0.25), (2, 0.75))
)


def test_rollouts_are_read_through_orchestrator_pod(use: Use, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = use(
        of_run(
            run("Running", **STORAGE),
            ("ls -1 /data/a/traces", "step_00000002.jsonl\nstep_00000003.jsonl\neval_00000003.jsonl\n"),
            ("cat /data/a/traces/step_00000003.jsonl", ROWS),
            ("cat", Answer(1, "", "cat: x: No such file or directory\ncommand terminated with exit code 1")),
            pods=PODS,
        )
    )
    assert main(["rollouts", "a", "--worst", "1"]) == 0
    text = capsys.readouterr().out
    assert "step 3: 1 of 2 rollouts" in text
    assert "reward 0.25" in text
    assert cluster.asked[-1][2:8] == ["exec", "--namespace", "team", "a-orchestrator-1", "-c", "orchestrator"]
    assert main(["rollouts", "a", "--step", "9"]) == exit_codes.USAGE
    assert "the run has traces of steps 2 to 3" in capsys.readouterr().err
    use(of_run(run("Complete", **STORAGE)))
    assert main(["rollouts", "a", "--step", "3"]) == exit_codes.USAGE
    told = capsys.readouterr().err
    assert (
        "pod: a has no orchestrator pod now: it is Complete (Training): step 7 of 100; `rlrun why a -n team` explains"
        in told
    )
    assert "mount the claim a-data 2Ti" in told


def test_runs_of_a_cluster_are_compared(use: Use, capsys: pytest.CaptureFixture[str]) -> None:
    lines = "".join(json.dumps({"step": step, "reward/mean": step / 10}) + "\n" for step in (1, 2, 3))
    use(of_run(run("Running", **STORAGE), ("cat /data/a/metrics.jsonl", lines), pods=PODS))
    assert main(["compare", "a", "a", "-o", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["lastTenth"]["reward/mean"] == [pytest.approx(0.3)] * 2
    assert (found["steps"], found["differences"]) == (3, {})


def test_debug_bundle_of_cluster_contains_no_secret(use: Use, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "of-this-shell-0815")
    secret = "hf_abcdefghijklmnopqrst"
    leaky = pod("a-trainer-0", "trainer")
    leaky["spec"]["containers"] = [
        {
            "env": [{"name": "WANDB_API_KEY", "value": "plain-words"}, {"name": "LEVEL", "value": "debug"}],
            "args": ["--token", "behind-it"],
        }
    ]
    leaky["metadata"]["managedFields"] = ["noise"]
    logged = f"with {secret}\nAuthorization: Bearer abcdef123456\nurl http://user:pa55word@proxy\nTOKEN={secret}\nkey of-this-shell-0815\n"
    use(
        of_run(
            run("Running", **STORAGE),
            ("logs", logged),
            ("get statefulsets", Answer(1, "", "error: no")),
            ("get persist", {"items": []}),
            pods=[leaky],
        )
    )
    file = tmp_path / "b.tar.gz"
    assert main(["debug", "a", "--file", str(file)]) == 0
    with tarfile.open(file) as bundle:
        parts = {one.name.partition("/")[2]: bundle.extractfile(one).read().decode() for one in bundle.getmembers()}  # type: ignore[union-attr]
    whole = "\n".join(parts.values())
    for word in (secret, "plain-words", "behind-it", "abcdef123456", "pa55word", "of-this-shell-0815", "managedFields"):
        assert word not in whole
    assert '"debug"' in parts["pods.json"], "what is no secret stays"
    assert "could not be read: kubectl get failed: no" in parts["workloads.json"]
    assert {
        "why.txt",
        "status.txt",
        "versions.txt",
        "rlrun.json",
        "events.json",
        "logs/a-trainer-0.log",
    } <= parts.keys()
    assert file.stat().st_mode & 0o777 == 0o600
    assert main(["debug", "a", "--file", str(file)]) == exit_codes.USAGE


def test_watch_prints_each_change_once_until_run_ends(
    use: Use, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = iter(
        [
            run("Starting"),
            run("Starting"),
            None,
            run("Running"),
            run("Failed", condition("Failed", "True", "PermanentFailure", "x")),
        ]
    )
    cluster = use(of_run(next(looks)))

    def pause(_seconds: float) -> None:
        found = next(looks)
        answer: Any = found if found is not None else Answer(1, "", "The connection to the server h:1 was refused")
        cluster.rules.insert(0, ("get rlruns.rlrun.io a", answer))

    monkeypatch.setattr("time.sleep", pause)
    assert main(["watch", "a"]) == exit_codes.FAILURE
    told = capsys.readouterr()
    assert [line.split()[0] for line in told.out.splitlines()] == ["Starting", "Running", "Failed"]
    assert "retrying" in told.err


def test_kubectl_plugin_offers_only_run_commands(
    use: Use, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("sys.argv", ["/usr/bin/kubectl-rlrun"])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "run.json").write_text("{}")
    cluster = use(of_run(run("Running")))
    assert kubectl_plugin.main(["-n", "team", "--context=lab", "why", "a"]) == 0
    assert cluster.asked[0][1:3] == ["--namespace=team", "--context=lab"], "a folder of the name is not meant"
    assert kubectl_plugin.main(["local", "run.yaml"]) == exit_codes.USAGE
    assert kubectl_plugin.main(["--help"]) == 0
    told = capsys.readouterr()
    assert "usage: kubectl rlrun COMMAND" in told.out
    assert "unknown command 'local'" in told.err


QUEUED = condition("Scheduled", "False", "WaitingForQuota", "position 3 of 5 in the queue: 8 GPUs wanted, 2 free")
NOT_STARTED = (
    "a has not started: it is Pending (WaitingForQuota): position 3 of 5 in the queue: 8 GPUs wanted, 2 free; "
    "`rlrun why a -n team` explains the cause and the fix"
)


@pytest.mark.parametrize("words", ["logs a", "logs a --role trainer", "rollouts a", "rollouts a --step 3", "pull a model",
                                   "pull a logs", "pull a run", "compare a a", "plot a"])  # fmt: skip
@pytest.mark.parametrize("known", [{}, STORAGE], ids=["no volume", "volume"])
def test_queued_run_is_reported_as_not_started(
    words: str, known: dict[str, Any], use: Use, capsys: pytest.CaptureFixture[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    use(of_run(run("Pending", QUEUED, attempt=0, progress={}, **known)))
    assert main(words.split()) == exit_codes.USAGE
    assert NOT_STARTED in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


def test_suspended_run_and_missing_attempt_are_explained(use: Use, capsys: pytest.CaptureFixture[str]) -> None:
    away = condition("Suspended", "True", "Suspended", "spec.suspend is true")
    use(of_run(run("Suspended", away, attempt=2, **STORAGE)))
    assert main(["logs", "a"]) == exit_codes.USAGE
    told = capsys.readouterr().err
    assert "attempt 2 has no pods now, and its logs on the volume, logs/attempt_0002, cannot be read" in told
    assert (
        "a has no orchestrator pod now: it is Suspended (Suspended): spec.suspend is true; `rlrun why a -n team`"
        in told
    )
    assert main(["logs", "a", "--attempt", "5"]) == exit_codes.USAGE
    assert "--attempt: a has no attempt 5 yet; it has attempts 1 to 2" in capsys.readouterr().err
    starting = pod("a-orchestrator-2", "orchestrator", attempt=2, ready=False)
    use(of_run(run("Starting", attempt=2, **STORAGE), pods=[starting]))
    assert main(["rollouts", "a"]) == exit_codes.USAGE
    assert "a has an orchestrator that is not ready (Running)" in capsys.readouterr().err


def test_role_without_logs_on_volume_is_reported(
    use: Use, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = use(of_run(run("Running", **STORAGE), pods=[pod("a-orchestrator-1", "orchestrator")]))
    monkeypatch.setattr(cluster, "show", lambda command: 3)
    assert main(["logs", "a", "--role", "inference"]) == exit_codes.USAGE
    assert "attempt 1 has no logs of inference on its volume; `rlrun status a -n team` shows" in capsys.readouterr().err


def test_diff_of_runs_without_steps_shows_configuration(use: Use, capsys: pytest.CaptureFixture[str]) -> None:
    gone = Answer(1, "", "cat: /data/a/metrics.jsonl: No such file or directory")
    use(of_run(run("Running", **STORAGE), ("metrics.jsonl", gone), pods=[pod("a-orchestrator-1", "orchestrator")]))
    assert main(["compare", "a", "a"]) == 0
    assert (
        "the runs have no common trained step: a, a has none yet; `rlrun status a -n team`" in capsys.readouterr().out
    )
    assert main(["plot", "a"]) == exit_codes.USAGE
    assert "a has no trained step yet, so it has no curve; see `rlrun status a -n team`" in capsys.readouterr().err
