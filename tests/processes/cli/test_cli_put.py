"""`rlrun put`: files arrive on a claim completely and atomically, or not at all; with this machine's shell and tar."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlrun.cli import data_files
from rlrun.cli.main import main
from rlrun.inspect.copies import HELPER_MOUNT
from rlrun.inspect.kubectl import Answer
from rlrun.runtime import exit_codes
from tests.unit.inspect.recorded import Recorded

MOUNT = "/data"
CLAIM = {"name": "v", "persistentVolumeClaim": {"claimName": "a-data"}}
RUN = {"metadata": {"name": "a"}, "spec": {}, "status": {"storage": {"claimName": "a-data"}}}


def make_pod(
    name: str = "a-orchestrator-1", *, running: bool = True, volume: Any = CLAIM, **mount: Any
) -> dict[str, Any]:
    state = {"running": {}} if running else {"terminated": {}}
    return {
        "metadata": {"name": name},
        "spec": {
            "volumes": [{"name": "tmp", "emptyDir": {}}, volume],
            "containers": [
                {"name": "sidecar"},
                {"name": "main", "volumeMounts": [{"name": "v", "mountPath": MOUNT} | mount]},
            ],
        },
        "status": {"containerStatuses": [{"name": "main", "state": state}, {"name": "sidecar", "state": state}]},
    }


class Volume:
    """A claim in a folder, and a cluster whose pods mount it."""

    def __init__(self, root: Path, *pods: dict[str, Any]) -> None:
        self.root = root
        root.mkdir()
        self.cut: Callable[[bytes], bytes] = lambda content: content
        self.created: list[bytes] = []
        not_found = Answer(1, "", 'Error from server (NotFound): rlruns.rlrun.io "maths" not found')
        self.cluster = Recorded(
            ("get rlruns.rlrun.io maths", not_found),
            ("get rlruns.rlrun.io a", RUN),
            ("get pods", {"items": list(pods)}),
            ("get persistentvolumeclaims", "a-data"),
            ("wait --for=condition=Ready", ""),
            ("delete pod", ""),
        )
        self.cluster.receivers = {"exec -i": self.receive, "create -f -": self.create}

    def create(self, content: bytes) -> Answer:
        self.created.append(content)
        return Answer(0, "", "")

    def receive(self, content: bytes) -> Answer:
        command = self.cluster.asked[-1]
        words = command[command.index("--") + 1 :]
        words = [str(self.root) if word in (MOUNT, HELPER_MOUNT) else word for word in words]
        done = subprocess.run(words, input=self.cut(content), capture_output=True, check=False)
        return Answer(done.returncode, "", done.stderr.decode())

    def files(self) -> dict[str, str]:
        return {str(one.relative_to(self.root)): one.read_text() for one in self.root.rglob("*") if one.is_file()}


@pytest.fixture
def volume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Volume:
    return mount_claim(tmp_path, monkeypatch, make_pod())


def mount_claim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *pods: dict[str, Any]) -> Volume:
    found = Volume(tmp_path / "claim", *pods)
    monkeypatch.setattr(data_files, "cluster_client", lambda _options: found.cluster.kubectl())
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    Path("rows.jsonl").write_text("rows")
    (Path("model") / "below").mkdir(parents=True)
    Path("model/config.json").write_text("{}")
    Path("model/below/weights").write_text("w" * 100_000)
    return found


def test_put_copies_files_and_folders(volume: Volume, capsys: pytest.CaptureFixture[str]) -> None:
    Path("model/link").symlink_to("config.json")
    assert main(["put", "rows.jsonl", "model", "a"]) == 0
    assert "claim a-data: 4 files" in (out := capsys.readouterr().out)
    assert "in a run's pods: /data/data/rows.jsonl" in out
    expected = {
        "rows.jsonl": "rows",
        "model/config.json": "{}",
        "model/link": "{}",
        "model/below/weights": "w" * 100_000,
    }
    assert volume.files() == {f"data/{name}": content for name, content in expected.items()}
    assert not (volume.root / "data/model/link").is_symlink()
    assert (volume.root / "data/rows.jsonl").stat().st_mode & 0o777 == 0o644
    assert sorted(one.name for one in (volume.root / "data").iterdir()) == ["model", "rows.jsonl"]
    assert main(["put", "rows.jsonl", "claim/a-data", "--to", "sets/maths"]) == 0
    assert volume.files()["sets/maths/rows.jsonl"] == "rows"


@pytest.mark.parametrize(
    "pods", [[make_pod()], [make_pod(running=False)]], ids=["a pod that mounts it", "a temporary pod"]
)
def test_put_to_claim_shows_path_below_any_mount(
    pods: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs mount a claim at their own `spec.storage.mountPath`, not where the pod of the copy has it."""
    mount_claim(tmp_path, monkeypatch, *pods)
    command = ["put", "rows.jsonl", "claim/a-data", "--to", "sets/maths", "--image", "busybox:1.37"]
    assert main(command) == 0
    assert capsys.readouterr().out == (
        "claim a-data: 1 files, 4 B, in sets/maths; in a run's pods: "
        "sets/maths/rows.jsonl below spec.storage.mountPath (default: /data)\n"
    )
    assert main(command) != 0
    assert ": sets/maths/rows.jsonl exists; add --force" in capsys.readouterr().err


def test_put_replaces_existing_files_only_with_force(volume: Volume, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["put", "rows.jsonl", "a"]) == 0
    Path("rows.jsonl").write_text("new")
    Path("other").write_text("x")
    assert main(["put", "other", "rows.jsonl", "a"]) != 0
    assert "data/rows.jsonl exists; add --force to replace it" in capsys.readouterr().err
    assert volume.files() == {"data/rows.jsonl": "rows"}, "nothing of it is there"
    assert main(["put", "other", "rows.jsonl", "a", "--force"]) == 0
    assert volume.files() == {"data/rows.jsonl": "new", "data/other": "x"}
    assert main(["put", "model", "a"]) == 0
    assert main(["put", "model", "a", "--force"]) != 0
    assert "model is a folder that exists" in capsys.readouterr().err


@pytest.mark.parametrize("kept", [0, 100, 600, 1024])
def test_truncated_stream_leaves_no_files(kept: int, volume: Volume, capsys: pytest.CaptureFixture[str]) -> None:
    Path("rows.jsonl").write_text("r" * 400)
    volume.cut = lambda content: content[:kept]
    assert main(["put", "rows.jsonl", "a"]) != 0
    assert capsys.readouterr().out == ""
    assert volume.files() == {}
    assert list((volume.root / "data").iterdir()) == []


@pytest.mark.parametrize("link", ["sets", "sets/maths"])
def test_put_does_not_follow_folder_link_on_claim(
    link: str, volume: Volume, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (volume.root / link).parent.mkdir(exist_ok=True)
    (volume.root / link).symlink_to(outside)
    assert main(["put", "rows.jsonl", "a", "--to", "sets/maths"]) != 0
    assert "is a link; name another folder with --to" in capsys.readouterr().err
    assert list(outside.iterdir()) == []


def test_put_replaces_file_link_without_following(volume: Volume, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("theirs")
    (volume.root / "data").mkdir()
    (volume.root / "data/rows.jsonl").symlink_to(outside)
    assert main(["put", "rows.jsonl", "a"]) != 0
    assert main(["put", "rows.jsonl", "a", "--force"]) == 0
    assert (outside.read_text(), volume.files()) == ("theirs", {"data/rows.jsonl": "rows"})


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["rows.jsonl", "a", "--to", "../x"], "--to: got '../x', expected a folder below the root of the claim"),
        (["rows.jsonl", "a", "--to", "/x"], "--to: got '/x'"),
        (["rows.jsonl", "a", "--to", "x/../../y"], "--to: got"),
        (["rows.jsonl", "a", "--to", "."], "--to: got '.'"),
        (["gone", "a"], "there is no file gone"),
        (["rows.jsonl", "model/../rows.jsonl", "a"], "have the same name"),
        (["/dev/null", "a"], "is neither a file nor a folder"),
        (["pipes", "a"], "is neither a file nor a folder"),
        (["linked", "a"], "is a link to a folder and is not followed"),
        ([".rlrun-put-x", "a"], "is not allowed on the claim"),
        (["rows.jsonl", "maths"], "for a claim write claim/maths"),
        (
            ["rows.jsonl", "runs/a"],
            "RUN: got runs/a, expected the name of a run in a cluster, or claim/NAME",
        ),
        (["rows.jsonl", "claim/"], "RUN: got claim/"),
    ],
)
def test_unsendable_files_are_refused_before_any_copy(
    words: list[str], expected: str, volume: Volume, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("pipes").mkdir()
    os.mkfifo("pipes/one")
    Path("linked").mkdir()
    Path("linked/up").symlink_to("..")
    Path(".rlrun-put-x").touch()
    assert main(["put", *words]) == exit_codes.USAGE
    assert expected in capsys.readouterr().err
    assert list(volume.root.iterdir()) == []
    assert not [one for one in volume.cluster.asked if "exec" in one]


@pytest.mark.parametrize(
    "other",
    [
        make_pod(running=False),
        make_pod(subPath="x"),
        make_pod(readOnly=True),
        make_pod(volume={"name": "v", "persistentVolumeClaim": {"claimName": "another"}}),
        make_pod() | {"metadata": {"name": "a", "deletionTimestamp": "2027-01-15T07:00:00Z"}},
    ],
    ids=["ended", "a part of it", "read-only", "another claim", "terminating"],
)
def test_put_creates_pod_if_no_pod_mounts_claim(
    other: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    volume = mount_claim(tmp_path, monkeypatch, other)
    assert main(["put", "rows.jsonl", "a"]) == exit_codes.USAGE
    assert "no running pod mounts the claim a-data; add --image busybox:1.37" in capsys.readouterr().err
    assert main(["put", "rows.jsonl", "a", "--image", "busybox:1.37"]) == 0
    assert volume.files() == {"data/rows.jsonl": "rows"}
    assert b'"claimName": "a-data"' in volume.created[0]
    assert volume.cluster.asked[-1][-3:-1] == [
        "pod",
        volume.cluster.asked[-2][volume.cluster.asked[-2].index("-i") + 1],
    ]
    volume.cut = lambda content: content[:100]
    assert main(["put", "rows.jsonl", "a", "--image", "busybox:1.37", "--force"]) != 0
    assert "delete" in volume.cluster.asked[-1], "a pod that was made is deleted whatever happens"
