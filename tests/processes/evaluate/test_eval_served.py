"""Evaluation and synthesis with an OpenAI-style server: requests, error messages, and no loss of finished answers."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlrun.cli.main import main
from rlrun.evaluate.served import servers as served
from rlrun.evaluate.served.servers import ClientConfig, RefusedError, Servers
from rlrun.protocol.files.failures import RoleError
from tests.support.chat_api import Answer, ChatApi, backwards, cut, never, status, text
from tests.support.program_forks import RLRUN, program_forks
from tests.support.programs import wait_for
from tests.support.waiting import UNREACHED_SECONDS, wait_until

ROOT = Path(__file__).parents[3]
BODY = {"model": "m", "messages": [{"role": "user", "content": "<abc>"}], "max_tokens": 8}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served, "FIRST_BACKOFF_SECONDS", 0.001)
    monkeypatch.setattr(served, "LONGEST_BACKOFF_SECONDS", 0.002)
    for name in ("VLLM_API_KEY", "OPENAI_API_KEY", "HTTP_PROXY", "http_proxy"):
        monkeypatch.delenv(name, raising=False)


async def send_request(api: ChatApi, env: dict[str, str] | None = None, **client: Any) -> str:
    """Return the reply to one request, or the error message."""
    async with api.running():
        servers = Servers(ClientConfig(base_url=[api.url], **client), env or {})
        try:
            await servers.model("m")
            return (await servers.ask(BODY)).text
        except (RoleError, RefusedError) as error:
            return f"{type(error).__name__}: {error}".replace(api.url, "URL")
        finally:
            await servers.close()


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (status(500, "out of memory"), "cba"),
        (status(502), "cba"),
        (status(429, "slow down", **{"Retry-After": "0"}), "cba"),
        (status(429, "slow down", **{"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}), "cba"),
        (cut, "cba"),
        (text('{"choices": [{"message": {"role"'), "cba"),
        (status(400, "'max_tokens' is not supported; use 'max_completion_tokens'"), "cba"),
        (status(400, "maximum context length is 8"), "RefusedError: URL/chat/completions returned status 400: maximum"),
        (status(422, "top_k: extra"), "RefusedError: URL/chat/completions returned status 422: top_k: extra"),
        (
            status(429, "quota", **{"Retry-After": "90000"}),
            "RoleError: client.base_url: URL/chat/completions returned status 429: quota; it requests a delay of 90000 s; finished",
        ),
        (status(403, "no"), "RoleError: client.api_key_var: the server needs a key; set it in VLLM_API_KEY or OPENAI_API_KEY"),
        (status(402, "pay"), "RoleError: client.base_url: URL/chat/completions returned status 402: pay; finished answers are"),
        (status(404, "gone"), "RoleError: client.base_url: URL/chat/completions returned status 404: gone; finished"),
        (status(307, **{"Location": "https://x"}), "RefusedError: URL/chat/completions returned status 307: redirect to https://x"),
        (text("<html>login</html>", "text/html"), "RefusedError: URL/chat/completions did not return JSON: <html>login</html>"),
        (text('{"choices": []}'), 'RefusedError: URL/chat/completions did not return a chat completion: {"choices": []}'),
        (text('{"choices": [{"message": {"content": 3}}]}'), "RefusedError: URL/chat/completions did not return a chat completion"),
        (text("[1]"), "RefusedError: URL/chat/completions did not return a chat completion: [1]"),
        (text("NaN"), "RefusedError: URL/chat/completions did not return a chat completion: NaN"),
    ],
)  # fmt: skip
async def test_server_failure_is_retried_or_explained(answer: Answer, said: str) -> None:
    assert (await send_request(ChatApi(answers=[answer, backwards]))).startswith(said)


@pytest.mark.parametrize("answer", [never, cut, status(503, "loading")])
async def test_server_retries_are_bounded(answer: Answer) -> None:
    api = ChatApi(answers=[answer])
    said = await send_request(api, max_retries=2, timeout=0.2 if answer is never else UNREACHED_SECONDS)
    assert said.startswith("RefusedError: 3 tries failed, the last one with: URL/chat/completions ")
    assert len(api.asked) == 3 or (answer is never and len(api.asked) < 3), "a try may be over before it is heard"


@pytest.mark.parametrize(
    ("api", "env", "client", "said"),
    [
        (ChatApi(models=["a", "b"]), {}, {}, "RoleError: model.name: URL has no model 'm'; its models are: a, b"),
        (ChatApi(models=["a"]), {}, {"skip_model_check": True}, "cba"),
        (ChatApi(models=None), {}, {}, "cba"),
        (ChatApi(key="right-key"), {"OPENAI_API_KEY": "right-key"}, {}, "cba"),
        (ChatApi(key="right-key"), {"OPENAI_API_KEY": "no", "VLLM_API_KEY": "right-key"}, {}, "cba"),
        (ChatApi(key="right-key"), {"K": "right-key"}, {"api_key_var": "K"}, "cba"),
        (
            ChatApi(key="right-key"),
            {"OPENAI_API_KEY": "wrong-key"},
            {},
            "RoleError: client.api_key_var: the key in VLLM_API_KEY or OPENAI_API_KEY is refused, or select another variable with "
            "--client.api-key-var (URL/models returned status 401: Incorrect API key provided: ***.)",
        ),
        (
            ChatApi(key="right-key"),
            {},
            {"api_key_var": "K"},
            "RoleError: client.api_key_var: the server needs a key; set it in K (URL/models returned status 401: Incorrect",
        ),
    ],
)
async def test_model_and_key_are_checked_before_requests(
    api: ChatApi, env: dict[str, str], client: dict[str, Any], said: str
) -> None:
    answered = await send_request(api, env, **client)
    assert answered.startswith(said)
    assert len(api.asked) == (answered == "cba")
    assert "wrong-key" not in answered


async def test_one_of_several_servers_may_fail() -> None:
    bad, good = ChatApi(answers=[status(500)]), ChatApi()
    async with bad.running(), good.running():
        servers = Servers(
            ClientConfig(base_url=[bad.url, "http://127.0.0.1:9/v1", good.url], headers={"X-Org": "o"}), {}
        )
        assert await servers.model("m") == "m"
        for _ in range(4):
            assert (await servers.ask(BODY)).text == "cba"
        await servers.close()
    assert good.headers[0]["X-Org"] == "o"
    assert len(good.asked) == 4


async def test_consecutive_failed_questions_end_the_command() -> None:
    async with ChatApi(answers=[status(400, "top_k is unknown")]).running() as api:
        servers = Servers(ClientConfig(base_url=[api.url]), {})
        for _ in range(served.FAILED_IN_A_ROW - 1):
            with pytest.raises(RefusedError):
                await servers.ask(BODY)
        with pytest.raises(RoleError, match=r"questions in a row were not answered, the last one: .*top_k is unknown"):
            await servers.ask(BODY)
        await servers.close()


@pytest.mark.parametrize(
    ("client", "message"),
    [
        ({"base_url": ["localhost:8000"]}, "got 'localhost:8000'; expected a URL such as"),
        ({"base_url": ["ftp://x/v1"]}, "expected a URL such as"),
        ({"base_url": ["http://x:99999/v1"]}, "expected a URL such as"),
        ({"base_url": ["http://x/v1/chat/completions"]}, "without /chat/completions, which is added"),
        ({"base_url": ["http://x/v1?key=3"]}, "without"),
        ({"base_url": ["http://x/v1", "http://x/v1"]}, "contains a URL twice"),
        ({"base_url": []}, "at least 1 item"),
        ({"headers": {"X Y": "a"}}, "expected the name of a header"),
        ({"headers": {"X": "a\nb"}}, "contains a character that is not allowed in headers"),
        ({"headers": {"Content-Length": "3"}}, "is set by the HTTP client"),
        ({"timeout": 0}, "greater than 0"),
        ({"timeout": float("nan")}, "finite"),
        ({"api_key_var": "AWS_*"}, "expected the name of one variable"),
    ],
)
def test_invalid_client_is_refused(client: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ClientConfig(**client)


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ChatApi]:
    """Server that runs in its own thread."""
    import asyncio

    monkeypatch.chdir(tmp_path)
    served_here, ready, end = ChatApi(), threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        async with served_here.running():
            ready.set()
            await end.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    wait_until(ready.is_set, "the server answers")
    yield served_here
    loop.call_soon_threadsafe(end.set)
    thread.join()
    loop.close()


def write_manifest(path: Path, **changes: Any) -> str:
    spec = {
        "model": {"tiny": {}},
        "maxSteps": 3,
        "environments": [{"id": "reverse-text"}],
        "sampling": {"maxTokens": 8},
    }
    whole = {"apiVersion": "rlrun.io/v1alpha1", "kind": "RLRun", "metadata": {"name": "r"}, "spec": spec | changes}
    path.write_text(yaml.safe_dump(whole))
    return str(path)


def test_eval_of_manifest_uses_server(api: ChatApi, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_manifest(tmp_path / "run.yaml", evaluation={"sampling": {"topK": 5, "seed": 1, "stop": ["\n"]}})
    words = [
        "eval",
        run,
        "--client.base-url",
        api.url,
        "--model.name",
        "m",
        "--max-tasks",
        "2",
        "--samples-per-task",
        "2",
    ]
    api.answers = [status(503), backwards]
    assert main(words) == 0, capsys.readouterr().err
    (result,) = json.loads((tmp_path / "evaluations/r/results.json").read_text())["results"]
    assert (result["policy"], result["answers"], result["metrics"]["reward/mean"]) == ("m", 4, 1.0)
    assert result["metrics"]["completion_length/mean"] == 3
    assert len(api.asked) == 5
    assert {key: value for key, value in api.asked[-1].items() if key not in ("messages", "seed")} == {
        "model": "m", "max_tokens": 8, "temperature": 1.0, "top_k": 5, "stop": ["\n"],
    }  # fmt: skip
    assert {one["seed"] for one in api.asked} == {1, 2}
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "  answers:  evaluations/r/answers",
        "  continue: the same command with more --samples-per-task or --max-tasks requests only the new answers",
    ]
    api.answers = [never]
    assert main(words) == 0
    assert len(api.asked) == 5, "what is answered is not asked again"


def test_synthesize_of_files_writes_messages(api: ChatApi, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "s.yaml").write_text(
        yaml.safe_dump({"environments": [{"id": "reverse-text"}], "client": {"base_url": api.url}, "max_concurrent": 1})
    )
    api.answers = [status(400, "too long"), backwards]
    words = ["synthesize", "@", "s.yaml", "--output", "d.jsonl", "--max-tasks", "3", "--client.headers.X-Org", "o"]
    assert main(words) == 0
    told = capsys.readouterr()
    assert "1 of 3 answers failed; the first: " in told.err
    assert told.out.splitlines()[-2:] == [
        "  answers:  d.jsonl.parts/answers",
        "  next:     train on it with task SFT and `data.sources: [{path: d.jsonl}]`",
    ]
    rows = [json.loads(line) for line in Path("d.jsonl").read_text().splitlines()]
    assert [row["policy"] for row in rows] == ["m", "m"], "the only model that the server has"
    assert rows[0]["messages"][0]["content"].strip("<>")[::-1] == rows[0]["messages"][1]["content"].strip("<>")
    assert api.headers[0]["X-Org"] == "o"
    Path("d.jsonl").unlink()
    assert main(words) == 0
    assert len(api.asked) == 4, "the failed one alone is asked again"


def test_unresponsive_server_ends_the_command(api: ChatApi, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_manifest(tmp_path / "run.yaml", environments=[{"id": "reverse-text", "timeoutSeconds": 1}])
    api.answers = [never]
    assert main(["eval", run, "--client.base-url", api.url, "--max-tasks", "9"]) == 69
    told = capsys.readouterr().err
    assert "8 questions in a row were not answered, the last one: no reply within the 1 s of an episode" in told
    assert told.splitlines()[-3:] == [
        "  saved:    no answers yet",
        "  log:      evaluations/r/eval.log",
        f"  repair the cause, then continue: rlrun eval {run} --client.base-url {api.url} --max-tasks 9",
    ]
    assert len(api.asked) <= 9, "will not be requested again"


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGKILL,
        pytest.param(signal.SIGINT, marks=pytest.mark.full),
        pytest.param(signal.SIGTERM, marks=pytest.mark.full),
    ],
)
def test_killed_evaluation_resumes_with_saved_answers(api: ChatApi, tmp_path: Path, number: int) -> None:
    run = write_manifest(tmp_path / "run.yaml", orchestrator={"maxConcurrency": 1})
    api.answers = [backwards, backwards, never]
    words = ["eval", run, "--client.base-url", api.url, "--max-tasks", "4"]
    process = program_forks().open(RLRUN, *words, environment=os.environ, folder=Path.cwd())

    def kept() -> int:
        return sum(file.read_bytes().count(b"\n") for file in Path("evaluations/r/answers").rglob("*.jsonl"))

    try:
        wait_for(lambda: (len(api.asked), kept()) == (3, 2) or process.poll() is not None)
        assert (len(api.asked), kept()) == (3, 2), (
            "answers are made durable beside the next question, many with one flush"
        )
    finally:
        process.send_signal(number)
        _, told = process.communicate()
    if number != signal.SIGKILL:
        assert process.returncode == 130, told
        assert told.splitlines()[-4:] == [
            "eval: interrupted and stopped",
            "  saved:    2 answers in evaluations/r/answers, which will not be requested again",
            "  log:      evaluations/r/eval.log",
            f"  continue: rlrun {' '.join(words)}",
        ]
    api.answers = [backwards]
    assert main(words) == 0
    assert len(api.asked) == 3 + 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", "3"], "eval: --steps applies only to engines, but client names servers"),
        (["--engine-url", "http://x"], "eval: --engine-url applies only to engines"),
        (["--inference-gpu-ids", "0"], "eval: --inference-gpu-ids applies only to engines"),
        (["--client.base-rl", "x"], "--client.base-rl: unknown option (did you mean --client.base-url?)"),
        (["--client.timeout", "soon"], '--client.timeout: got "soon" (a string), expected a number greater'),
        (
            ["--client.elastic.hostname", "x"],
            "--client.elastic.hostname: not supported: write each server into client.base_url",
        ),
        (["--client.type", "anthropic_messages"], "which is not supported: requests are OpenAI's chat completions"),
        (["--model.name", ""], "--model.name: got '', expected the model's name at the server"),
    ],
)
def test_mistake_in_served_evaluation_is_one_line(
    options: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    run = write_manifest(tmp_path / "run.yaml")
    assert main(["eval", run, "--client.base-url", "http://127.0.0.1:9/v1", *options]) in (64, 78)
    err = capsys.readouterr().err
    assert message in err
    assert len(err.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"], "nothing is made"


def test_training_refuses_served_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_manifest(tmp_path / "run.yaml")
    assert main(["local", run, "--client.base-url", "https://api.openai.com/v1"]) == 64
    assert "training needs token ids, log-probs and changeable weights" in capsys.readouterr().err
