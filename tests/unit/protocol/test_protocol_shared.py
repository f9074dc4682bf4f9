"""Request and state files of shared trainers."""

from __future__ import annotations

from pathlib import Path

from rlrun.protocol.files import shared_trainer_files
from rlrun.protocol.files.paths import RunPaths
from rlrun.protocol.files.shared_trainer_files import SlotAnswer, SlotRequest
from rlrun.protocol.messages.endpoints import key_digest

DIGEST = key_digest("the-guests-key")


def test_request_is_read_until_withdrawal(tmp_path: Path) -> None:
    host = shared_trainer_files.host_paths(tmp_path / "guest", "host")
    assert host.root == tmp_path / "host"
    assert shared_trainer_files.read_requests(host) == []
    for attempt in (1, 2):
        join = SlotRequest(run="guest", attempt=attempt, folder=str(tmp_path / "guest"), key_digest=DIGEST)
        shared_trainer_files.write_request(host, join)
        assert shared_trainer_files.read_requests(host) == [join]
    assert [path.relative_to(host.shared) for path in host.shared.rglob("*.*")] == [Path("guest/join.json")]
    shared_trainer_files.delete_request(host, "guest")
    shared_trainer_files.delete_request(host, "guest")
    assert shared_trainer_files.read_requests(host) == []


def test_invalid_requests_are_ignored(tmp_path: Path) -> None:
    host = RunPaths(tmp_path)
    good = SlotRequest(run="b", attempt=1, folder="/runs/b", key_digest=DIGEST)
    shared_trainer_files.write_request(host, good)
    for guest, text in (
        ("half", '{"run": "ha'),
        ("other", good.model_dump_json()),
        ("without", good.model_dump_json(exclude={"key_digest"}).replace('"b"', '"without"')),
    ):
        shared_trainer_files.join_file(host, guest).parent.mkdir()
        shared_trainer_files.join_file(host, guest).write_text(text)
    assert shared_trainer_files.read_requests(host) == [good]


def test_shared_state_is_read_only_by_its_attempt(tmp_path: Path) -> None:
    host = RunPaths(tmp_path)
    assert shared_trainer_files.read_state(host, "guest", 2) is None
    state = SlotAnswer(run="guest", attempt=2, slot=1, state="Joined", step=4)
    shared_trainer_files.write_answer(host, state)
    assert shared_trainer_files.read_state(host, "guest", 2) == state
    assert shared_trainer_files.read_state(host, "guest", 3) is None
    shared_trainer_files.state_file(host, "guest").write_text("{")
    assert shared_trainer_files.read_state(host, "guest", 2) is None


def test_tiny_model_folder_belongs_to_host() -> None:
    assert shared_trainer_files.model_folder(Path("/runs/guest"), "host") == Path("/runs/host/model")
    assert shared_trainer_files.model_folder(Path("/runs/guest"), None) == Path("/runs/guest/model")
