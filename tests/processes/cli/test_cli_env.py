"""`rlrun env`: one episode of an environment, with replies from options, standard input or a server."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from rlrun.cli.main import main
from rlrun.runtime import exit_codes
from tests.support.python_path import before

CALCULATOR = ["env", "try", "calculator", "--task", "3"]


class Server(ThreadingHTTPServer):
    """Server that answers each request with the next of `answers` and records the request."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: list[tuple[int, Any]] = []
        self.asked: list[tuple[dict[str, Any], str | None]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1/"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((body, self.headers.get("Authorization")))
        status, document = self.server.answers.pop(0)
        content = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        return


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as serving:
        thread = threading.Thread(target=serving.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield serving
        serving.shutdown()
        thread.join()


def make_completion(text: str) -> tuple[int, Any]:
    return 200, {"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}]}


def test_shipped_environments_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "list"]) == 0
    assert "gsm8k         Solve a word problem" in capsys.readouterr().out
    assert main(["env", "list", "more"]) == exit_codes.USAGE
    assert main(["env", "play"]) == exit_codes.USAGE


def test_replies_of_several_turns_come_from_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*CALCULATOR, "--reply", "calc(2+3)", "--reply", "5", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [message["role"] for message in document["messages"]] == ["system", "user", "assistant", "user", "assistant"]
    assert document["messages"][3]["content"] == "5"
    assert (document["replies"], document["metrics"]["calls"]) == (2, 1.0)


ADDER = """
from rlrun.environments import Episode, Score, SingleTurnEnvironment, Task

TOOLS = [{"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object", "properties": {}}}}]

class Adder(SingleTurnEnvironment):
    id = "adder"

    def tasks(self, split):
        return [Task(id="t", prompt=[{"role": "user", "content": "2+3"}])] if split == "train" else []

    async def run(self, task, model):
        messages, replies = list(task.prompt), 0
        while True:
            reply = await model.complete(messages, tools=TOOLS)
            messages, replies = [*messages, reply.message], replies + 1
            if not reply.tool_calls:
                return Episode(messages, replies)
            for call in reply.tool_calls:
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": call["function"]["arguments"]})

    async def score(self, task, episode):
        return Score(float(episode.messages[-1]["content"] == "5"))

def make():
    return Adder()
"""


def test_tool_call_in_reply_is_executed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "adder.py").write_text(ADDER)
    monkeypatch.setenv("PYTHONPATH", before(str(tmp_path)))
    calls = [f'<tool_call>{{"name": "add", "arguments": {{"a": {a}}}}}</tool_call>' for a in (2, 3)]
    argv = ["env", "try", "adder:make", "--reply", f"I add. {calls[0]}{calls[1]}", "--reply", calls[0], "--reply", "5"]
    assert main([*argv, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    roles = ["user", "assistant", "tool", "tool", "assistant", "tool", "assistant"]
    assert [message["role"] for message in document["messages"]] == roles
    assert document["messages"][1]["content"] == "I add."
    assert [json.loads(document["messages"][at]["content"]) for at in (2, 3, 5)] == [{"a": 2}, {"a": 3}, {"a": 2}]
    ids = [message["tool_call_id"] for message in document["messages"] if message["role"] == "tool"]
    assert len(set(ids)) == 3
    assert all(len(id) == 9 and id.isalnum() for id in ids)
    assert (document["replies"], document["reward"]) == (3, 1.0)


def test_episode_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["env", "try", "reverse-text", "--args", '{"length": 2}', "--split", "eval", "--reply", "ab"]
    assert main(argv) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("task eval-0")
    assert "[user]\n" in shown
    assert "[assistant]\n  ab\n" in shown
    assert "\nreward " in shown


def test_replies_are_read_from_standard_input(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("calc(1+1)\n2\n"))
    assert main(CALCULATOR) == 0
    shown = capsys.readouterr()
    assert shown.err.count("[user]") == 2
    assert "[system]" in shown.err
    assert "reward" in shown.out


def test_missing_reply_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*CALCULATOR, "--reply", "calc(1+1)"]) == exit_codes.USAGE
    assert "the environment requests reply 2, but only 1 were given; add another --reply" in capsys.readouterr().err


def test_server_generates_replies(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OWN_KEY", "secret")
    server.answers = [make_completion("calc(2+3)"), make_completion("5")]
    argv = [
        "--base-url",
        server.url,
        "--model",
        "m",
        "--api-key-env",
        "OWN_KEY",
        "--max-tokens",
        "7",
        "--temperature",
        "0.5",
    ]
    assert main([*CALCULATOR, *argv, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["replies"] == 2
    (first, key), (second, _) = server.asked
    assert key == "Bearer secret"
    assert (first["model"], first["temperature"]) == ("m", 0.5)
    assert first["max_tokens"] <= 7
    assert second["messages"][: len(first["messages"])] == first["messages"]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((404, {"error": "no model m"}), "returned status 404"),
        ((200, {"object": "list"}), "did not return a chat completion"),
    ],
)
def test_failing_server_is_reported(
    answer: tuple[int, Any], said: str, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    server.answers = [answer]
    assert main([*CALCULATOR, "--base-url", server.url, "--model", "m"]) == exit_codes.UNAVAILABLE
    shown = capsys.readouterr().err
    assert said in shown
    assert "Traceback" not in shown


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        (["nope"], exit_codes.CONFIGURATION, "unknown environment 'nope'"),
        (["arithmetic", "--args", "{"], exit_codes.USAGE, "expected JSON"),
        (["arithmetic", "--args", "[1]"], exit_codes.USAGE, "expected a JSON object"),
        (["arithmetic", "--args", '{"no": 1}'], exit_codes.CONFIGURATION, "no argument 'no'"),
        (["arithmetic", "--task", "-1"], exit_codes.USAGE, "expected a whole number from 0"),
        (["arithmetic", "--task", "99999999", "--reply", "1"], exit_codes.USAGE, "tasks, counted from 0"),
        (["arithmetic", "--base-url", "http://x"], exit_codes.USAGE, "--base-url and --model belong together"),
        (["arithmetic", "--base-url", "http://x", "--model", "m", "--reply", "1"], exit_codes.USAGE, "choose one"),
    ],
)
def test_invalid_arguments_are_refused(
    argv: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["env", "try", *argv]) == code
    shown = capsys.readouterr().err
    assert said in shown
    assert "Traceback" not in shown
