"""Models and data of a hub, with the hub's own client and a local hub.

The client reads its addresses and mode once, at import: each case is a separate process.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from rlrun.runtime import exit_codes
from tests.support.hub import Hub, Repo, hub
from tests.support.program_forks import CODE, program_forks
from tests.support.programs import finish, wait_for

WEIGHTS = bytes(range(256)) * 8192
"""2 MiB, so that a broken download has a remaining part."""
FILES = {
    "config.json": b'{"model_type": "llama"}', "tokenizer.json": b"{}", "model.safetensors": WEIGHTS,
    "pytorch_model.bin": b"pickled", "onnx/model.onnx": b"other", "original/model.safetensors": b"another",
}  # fmt: skip
ROWS = b'{"prompt": "a", "completion": "b"}\n'
PROGRAM = """
import json, os, sys
assert "huggingface_hub" not in sys.modules
from pathlib import Path
from rlrun.config.models.language_models import ModelConfig
from rlrun.environments.dataset_rows import download_set
from rlrun.hub import fetch
from rlrun.hub.repository import VARIABLE, keep_revisions
from rlrun.protocol.files.failures import RoleError
from rlrun.protocol.files.paths import RunPaths
from rlrun.runtime.process_logs import configure_log

configure_log(sys.stderr, "{message}")
fetch.PAUSE_SECONDS = 0.01
import huggingface_hub.constants
huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE = 100_000

def answer(what="model", name="org/tiny", revision=None, run="run", weights=True, token=None):
    os.environ.pop(VARIABLE, None)
    if token is not None:
        os.environ["HF_TOKEN"] = token
    if run:
        keep_revisions(RunPaths(Path(run)))
    try:
        if what == "model":
            model = ModelConfig(name=name, revision=revision)
            folder = Path(fetch.model_source(model, Path("made"), with_weights=weights))
        else:
            folder = download_set(name, "data.sources[0]", revision)
    except RoleError as error:
        return {"error": str(error), "code": error.code}
    files = {str(f.relative_to(folder)): f.stat().st_size for f in sorted(folder.rglob("*")) if f.is_file()}
    return {"folder": str(folder), "files": files}

print(json.dumps([answer(**asked) for asked in json.loads(sys.argv[1])]))
"""


@pytest.fixture
def server() -> Iterator[Hub]:
    with hub() as running:
        yield running


@pytest.fixture
def model(server: Hub) -> Repo:
    repo = server.repositories["models/org/tiny"] = Repo()
    repo.commit(FILES)
    return repo


class Role:
    """A process of a run that requests models and data sets."""

    def __init__(self, server: Hub, folder: Path) -> None:
        self.server, self.folder, self.variables = server, folder, {"HF_HOME": str(folder / "hub")}

    def start(self, *asked: dict[str, Any]) -> subprocess.Popen[str]:
        """Start a program that sends requests, forked from a process without the hub's client."""
        kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
        # The requesting process must not retry while a test holds a file back.
        patient = {"HF_HUB_DOWNLOAD_TIMEOUT": "240", "HF_HUB_ETAG_TIMEOUT": "240"}
        base = kept | patient | {"HF_ENDPOINT": self.server.url}
        variables = base | {"HF_HUB_DISABLE_XET": "1", "HOME": str(self.folder)} | self.variables
        words = (CODE, PROGRAM, json.dumps(asked or [{}]))
        return cast("subprocess.Popen[str]", program_forks().open(*words, environment=variables, folder=self.folder))

    def ask(self, *asked: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the answers of one process, in sequence; without arguments to one request."""
        process = self.start(*asked)
        out, log = finish(process)
        assert process.returncode == 0, log
        answers: list[dict[str, Any]] = json.loads(out)
        return answers

    def fetching(self) -> subprocess.Popen[str]:
        """Return a process that waits for the content of the weights."""
        self.server.hold.clear()
        process = self.start()
        wait_for(lambda: any(path.startswith("/store") for path in self.server.fetched()), "a request for the weights")
        return process


@pytest.fixture
def role(server: Hub, tmp_path: Path) -> Role:
    return Role(server, tmp_path)


def test_run_keeps_commit_and_works_without_hub(server: Hub, model: Repo, role: Role) -> None:
    [first] = role.ask()
    sha = model.branches["main"]
    assert first["folder"].endswith(f"/models--org--tiny/snapshots/{sha}")
    assert first["files"] == {"config.json": 23, "tokenizer.json": 2, "model.safetensors": len(WEIGHTS)}
    record = json.loads((role.folder / "run/revisions/models--org--tiny@main.json").read_text())
    assert record == {"kind": "model", "name": "org/tiny", "revision": "main", "commit": sha}
    moved = model.commit(FILES | {"config.json": b"{}"})
    asked = len(server.asked)
    again, tokenizer, other = role.ask({}, {"weights": False}, {"run": "other"})
    assert again == tokenizer == first, "another attempt has what the first one had"
    assert other["folder"].endswith(moved), "another run begins with the branch as it is now"
    assert [request.path for request in server.asked[asked:] if "/api/" in request.path] == [
        "/api/models/org/tiny/revision/main",
        f"/api/models/org/tiny/tree/{moved}",
    ], "of the run that has its commit and its files the hub is not even asked"
    role.variables["HF_HUB_OFFLINE"] = "1"
    again, new = role.ask({}, {"run": "new"})
    assert (again, new["folder"]) == (first, other["folder"]), "offline: what the cache knows as main"


def test_only_tokenizer_is_fetched_and_pickled_weights_are_refused(server: Hub, model: Repo, role: Role) -> None:
    model.commit({"config.json": b"{}", "pytorch_model.bin": b"pickled"}, "older")
    tokenizer, older = role.ask({"weights": False}, {"revision": "older"})
    assert tokenizer["files"] == {"config.json": 23, "tokenizer.json": 2}
    assert older["code"] == exit_codes.DATA
    assert "model.name: org/tiny has no safetensors weights" in older["error"]
    assert "python -c" in older["error"]
    assert not [path for path in server.fetched() if path.startswith("/store")]


def test_broken_download_resumes(server: Hub, model: Repo, role: Role) -> None:
    server.broken_off = [1_000_000, 500_000]
    [found] = role.ask()
    ranges = [asked.range for asked in server.asked if asked.path.startswith("/store") and asked.method == "GET"]
    assert ranges == [None, "bytes=1000000-", "bytes=1500000-"]
    assert Path(found["folder"], "model.safetensors").read_bytes() == WEIGHTS


def test_one_process_downloads_and_others_wait_with_message(server: Hub, model: Repo, role: Role) -> None:
    first = role.fetching()
    second = role.start({"run": "other"})
    assert second.stderr is not None
    said = next(line for line in second.stderr if "waiting" in line)
    server.hold.set()
    assert f"{os.uname().nodename}, process {first.pid} downloads model org/tiny; waiting for it" in said
    answers = [json.loads(finish(process)[0]) for process in (first, second)]
    assert answers[0] == answers[1]
    assert answers[0][0]["files"]["model.safetensors"] == len(WEIGHTS)
    assert len([path for path in server.fetched() if path.startswith("/store")]) == 1


def test_killed_download_is_incomplete(server: Hub, model: Repo, role: Role) -> None:
    killed = role.fetching()
    killed.kill()
    killed.communicate()
    server.hold.set()
    role.variables["HF_HUB_OFFLINE"] = "1"
    [refused] = role.ask()
    assert refused["code"] == exit_codes.DATA
    assert "model.name: org/tiny at main is missing or incomplete in the hub's cache" in refused["error"]
    assert refused["error"].endswith(
        "and HF_HUB_OFFLINE disables downloads; download it once without that variable, or use a folder with path"
    )
    del role.variables["HF_HUB_OFFLINE"]
    assert role.ask()[0]["files"]["model.safetensors"] == len(WEIGHTS)


def test_hub_error_is_one_message_with_field_and_fix(server: Hub, model: Repo, role: Role) -> None:
    model.token = "hf_right"
    gated = server.repositories["models/org/gated"] = Repo(gated=True)
    gated.commit(FILES)
    record = role.folder / "damaged/revisions/models--org--tiny@main.json"
    record.parent.mkdir(parents=True)
    record.write_text("{}")
    cases = [
        ({"token": ""}, exit_codes.CONFIGURATION, "model.name: the hub does not show org/tiny to requests without a token (401)"),
        ({"token": "hf_wrong"}, exit_codes.CONFIGURATION, "model.name: the hub does not show org/tiny to this token (401)"),
        ({"token": "hf_right"}, None, ""),
        ({"name": "org/other"}, exit_codes.DATA, f"model.name: {server.url} has no model org/other (404); check the name"),
        ({"name": "org/gated"}, exit_codes.CONFIGURATION, "account access to org/gated (403): accept"),
        ({"revision": "v9"}, exit_codes.DATA, "model.revision: model org/tiny has no revision v9 (404); set an existing branch"),
        ({"what": "dataset", "name": "org/rows"}, exit_codes.DATA, f"data.sources[0].name: {server.url} has no data set org/rows (404)"),
        ({"run": "damaged"}, exit_codes.DATA, f"{record.relative_to(role.folder)} does not contain a commit; delete it"),
    ]  # fmt: skip
    answers = role.ask(*(asked for asked, _, _ in cases))
    for answer, (_, code, message) in zip(answers, cases, strict=True):
        assert (answer.get("code"), message in answer.get("error", "")) == (code, True), answer
        assert "\n" not in answer.get("error", "")
    assert "HF_TOKEN from a Secret in envFrom of trainer, inference and orchestrator" in answers[0]["error"]


def test_unreachable_hub_is_a_retriable_failure(server: Hub, model: Repo, role: Role) -> None:
    server.shutdown()
    server.server_close()
    [refused] = role.ask()
    assert refused["code"] == exit_codes.FAILURE, "the failure policy tries again"
    assert f"model.name: the hub {server.url} cannot be reached (" in refused["error"]
    assert "spec.networkPolicy.extraEgress" in refused["error"]


def test_data_set_keeps_its_commit(server: Hub, role: Role) -> None:
    repo = server.repositories["datasets/org/rows"] = Repo()
    repo.commit({"train.jsonl": ROWS, "README.md": b"text"})
    asked = {"what": "dataset", "name": "org/rows"}
    [first] = role.ask(asked)
    assert first["files"] == {"train.jsonl": len(ROWS)}
    repo.commit({"train.jsonl": ROWS + ROWS})
    again, free = role.ask(asked, asked | {"run": ""})
    assert again == first
    assert free["files"] == {"train.jsonl": 2 * len(ROWS)}, "of no run: as it is now"
