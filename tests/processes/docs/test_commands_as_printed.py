"""Commands of README and docs, run as printed: on runs in folders, against recorded responses of a cluster, on files of each kind.

The commands come from the pages. `tests/unit/docs/documented_commands.py` names this test for each of them.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlrun.api.resolve import resolve_spec
from rlrun.api.resource import RLRunSpec
from rlrun.cli import kubectl_plugin, main, sft
from rlrun.inspect import kubectl
from rlrun.inspect.kubectl import Answer
from rlrun.protocol.files.batch import Batch, write_batch
from tests.processes.cli.test_cli_convert import block, write_rows
from tests.support.made_runs import sample, trained_long
from tests.unit.docs.documented_commands import AS_PRINTED, ROOT, TESTS, commands, pages
from tests.unit.inspect.recorded import PODS, Recorded, of_run
from tests.unit.inspect.test_pull import packed

PRINTED = sorted(
    {
        command
        for page in pages()
        for command in commands(page.read_text())
        if any(re.fullmatch(rule, command) for rule, test in TESTS.items() if test == AS_PRINTED)
    }
)
TOML = """max_steps = 30
[model]
name = "org/model"
[orchestrator]
batch_size = 8
rollouts_per_example = 4
[[environments]]
id = "reverse-text"
"""
QUICKSTART = (ROOT / "examples/quickstart.yaml").read_text()
SPEC = RLRunSpec.model_validate(yaml.safe_load(QUICKSTART)["spec"])
SHELL = ("ls", "tail", "head")
"""Programs of the shell, which expands the wildcards in their arguments."""
PROGRAMS: Mapping[str, Callable[[], int]] = {"rlrun": main.main, "sft": sft.main, "kubectl": kubectl_plugin.main}
NEWEST = "weights/v00000009.a0002"
RUN: dict[str, Any] = {
    "metadata": {"name": "NAME", "namespace": "team-a", "creationTimestamp": "2027-01-15T07:00:00Z"},
    "spec": yaml.safe_load(QUICKSTART)["spec"],
    "status": {
        "phase": "Running",
        "attempt": 1,
        "progress": {"step": 7, "totalSteps": 100},
        "storage": {"claimName": "NAME-data", "path": "/data/NAME"},
    },
}
CLAIM = {
    "metadata": {"name": "any"},
    "spec": {
        "volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "NAME-data"}}],
        "containers": [{"name": "c", "volumeMounts": [{"name": "v", "mountPath": "/data"}]}],
    },
    "status": {"containerStatuses": [{"name": "c", "state": {"running": {}}}]},
}


class Patched(Recorded):
    """Fake cluster that returns the patched run for a patch."""

    def start(self, command: Sequence[str], timeout: float) -> Answer:
        patch = next((word for word in command if word.startswith("--patch=")), None)
        if patch is None:
            return super().start(command, timeout)
        self.asked.append(list(command))
        return Answer(0, json.dumps(merge_documents(RUN, json.loads(patch.removeprefix("--patch=")))), "")


def merge_documents(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    both = {name: value for name, value in other.items() if isinstance(value, dict) and isinstance(one.get(name), dict)}
    return {**one, **other, **{name: merge_documents(one[name], value) for name, value in both.items()}}


def make_cluster() -> Recorded:
    """Return a fake cluster with the run NAME of the pages."""
    rules: list[tuple[str, Any]] = [
        ("get rlruns.rlrun.io NAME", RUN),
        ("ls -1 /data/NAME/weights/v", "COMPLETE\nconfig.json\n"),
        ("ls -1 /data/NAME/weights", "v00000009.a0002\n"),
        ("get persistentvolumeclaims", "my-data"),
        ("wait --for=condition=Ready", ""),
        ("delete pod", ""),
        ("logs", "a line\n"),
        ("cat /data/NAME/metrics.jsonl", ""),
    ]
    found = Patched(*of_run(RUN, *rules, pods=[*PODS, CLAIM]).rules)
    found.streams = {
        f"tar -C /data/NAME -cf - -- {NEWEST}": packed(f"{NEWEST}/config.json", f"{NEWEST}/COMPLETE"),
        "tar -C /data/NAME -cf - -- .": packed("./run.json"),
    }
    found.receivers = dict.fromkeys(("exec -i", "create -f -"), lambda _content: Answer(0, "", ""))
    return found


def write_state(here: Path) -> None:
    """Write the files and folders that the pages mention."""
    for name in ("run.yaml", "a.yaml", "b.yaml"):
        (here / name).write_text(QUICKSTART)
    for name in ("run.toml", "rl.toml", "base.toml"):
        (here / name).write_text(TOML)
    (here / "mine.toml").write_text("max_steps = 40\n")
    (here / "t.toml").write_text("max_steps = 45\n")
    for name in ("run.sh", "run_grpo.sh"):
        (here / name).write_text(block("text"))
    write_rows(here / "data" / "gsm8k")
    (here / "rows.jsonl").write_text("{}\n")
    (here / "gsm8k").mkdir()
    (here / "gsm8k" / "train.jsonl").write_text('{"question": "1+1?", "answer": "so #### 2"}\n')
    (here / "model").mkdir()
    (here / "model" / "config.json").write_text("{}")
    for name in ("a", "b", "NAME"):
        folder = trained_long(here / "runs" / name)
        config = resolve_spec(SPEC, name=name, uid=f"uid-{name}", output_dir=str(folder.root))
        folder.write("run.json", config.model_dump_json(by_alias=False))
        folder.ends()
    run = folder
    samples = tuple(sample(group, member, [1, 2, 3, 4]) for group in (159, 160) for member in range(4))
    write_batch(run.paths.batch(30, 1), Batch(30, 1, samples))
    run.write("traces/step_00000030.jsonl", (run.root / "traces/step_00000003.jsonl").read_text())
    run.write("logs/attempt_0001/trainer/trainer.log", "[rank0]: a line\n")
    (here / "runs" / "quickstart-1").symlink_to(run.root)
    run.write("traces/step_00000090.jsonl", (run.root / "traces/step_00000003.jsonl").read_text())
    attempt = {
        "attempt": 1,
        "base_attempt": None,
        "base_step": 0,
        "world_size": 2,
        "config_hash": "",
        "started_at": 1.7e9,
    }
    lineage = {"lineage": [{"attempt": 1, "first": 1, "last": None}], "origin": None, "uid": "uid-NAME"}
    run.write("attempts/0001.json", attempt | lineage)


@pytest.mark.parametrize("command", PRINTED)
def test_printed_command_runs(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_state(tmp_path)
    recorded = make_cluster()
    of_cluster = {"_start_process": "start", "_on_terminal": "show", "_stream_lines": "stream", "_send_input": "send"}
    for name, method in of_cluster.items():
        monkeypatch.setattr(kubectl, name, getattr(recorded, method))
    if command == "rlrun watch NAME":
        over = RUN | {"status": RUN["status"] | {"phase": "Complete"}}
        monkeypatch.setattr(time, "sleep", lambda _: recorded.rules.insert(0, ("get rlruns.rlrun.io NAME", over)))
    words = shlex.split(command)
    if " -o run.yaml" in command or "--output run.yaml" in command:
        Path("run.yaml").unlink()
    if command.startswith("rlrun rows"):
        Path("rows.jsonl").unlink()
    monkeypatch.setattr("sys.argv", ["kubectl-rlrun", *words[2:]] if words[0] == "kubectl" else words)
    try:
        code = subprocess.call(command, shell=True) if words[0] in SHELL else PROGRAMS[words[0]]()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    out, err = capfd.readouterr()
    assert code == 0, err
    assert out + err, "it says something"
    assert "Traceback" not in err
