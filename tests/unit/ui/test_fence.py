"""Attempts to read forbidden content: other files, other runs, secrets, and access from other sites."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rlrun.ui.guard import Guard
from rlrun.ui.static_files import StaticFiles
from tests.support.made_runs import SECRET, SHAPED, Client, Folder, client, made, rollout

ANSWERS = (
    "",
    "/manifest",
    "/curves?metric=loss",
    "/timeline",
    "/traces",
    "/rollouts?step=3",
    "/rollouts/0?step=3",
    "/staleness?step=3",
)


@pytest.fixture
def run(tmp_path: Path) -> Folder:
    return made(tmp_path / "runs" / "demo")


@pytest.fixture
def asked(run: Folder, static: StaticFiles) -> Client:
    return client(run.root.parent, static=static)[0]


def get(asked: Client, path: str) -> tuple[int, bytes]:
    plain, _, query = path.partition("?")
    reply = asked.get(plain, **dict(part.split("=") for part in query.split("&") if part))
    return reply.status, reply.body


@pytest.mark.parametrize(
    "path",
    [
        "/api/runs/..",
        "/api/runs/../../etc",
        "/api/runs/%2e%2e",
        "/api/runs/..%2f..%2fother",
        "/api/runs//etc/passwd",
        "/../../../etc/passwd",
        "//etc/passwd",
        "/assets/../../app.py",
        "/..%2fapp.py",
        "/static/index.html",
        "/index.html/../../app.py",
    ],
)
def test_path_traversal_is_refused(run: Folder, asked: Client, path: str) -> None:
    made(run.root.parent.parent / "other")
    status, body = get(asked, path)
    assert status == 404
    assert b"root:" not in body
    assert b"import" not in body


def test_run_outside_of_given_folders_is_unknown(run: Folder, asked: Client) -> None:
    other = made(run.root.parent.parent / "other")
    assert asked.get(f"/api/runs/{other.id}").status == 404
    assert [row["name"] for row in asked.json("/api/runs")["runs"]] == ["demo"]


def test_link_to_outside_run_is_refused_by_name(run: Folder, asked: Client) -> None:
    other = made(run.root.parent.parent / "other")
    link = Folder(run.root.parent / "mine")
    link.root.symlink_to(other.root)
    for answer in ANSWERS:
        status, body = get(asked, f"/api/runs/{link.id}{answer}")
        assert (status, b"a link to a folder outside" in body) == (403, True), answer
    assert [one["why"] for one in asked.json("/api/runs")["refused"]] == [
        "mine is a link to a folder outside of the folders of this page"
    ]
    assert asked.get("/api/compare", run=[run.id, link.id]).status == 403


@pytest.mark.parametrize(
    "name",
    [
        "run.json",
        "metrics.jsonl",
        "launcher.json",
        "identity.json",
        "attempts/0001.json",
        "attempts",
        "logs/attempt_0001",
        "logs/attempt_0001/trainer/error.json",
        "traces",
        "traces/step_00000003.jsonl",
        "checkpoints/step_00000001.a0001/manifest.json",
    ],
)
def test_links_never_leave_given_folders(run: Folder, asked: Client, name: str) -> None:
    outside = run.root.parent.parent / "outside"
    outside.mkdir()
    (outside / "file").write_text(
        '{"step": 3, "name": "stolen", "messages": [{"role": "user", "content": "stolen"}], "loss": 1}\n'
    )
    place = run.root / name
    place.parent.mkdir(parents=True, exist_ok=True)
    if place.is_dir():
        place.rename(outside / "moved")
    else:
        place.unlink(missing_ok=True)
    place.symlink_to(outside / "moved" if (outside / "moved").exists() else outside / "file")
    said = [get(asked, f"/api/runs/{run.id}{answer}") for answer in ANSWERS]
    assert all(b"stolen" not in body for _, body in said)
    assert any(status == 403 for status, _ in said)


def test_link_within_given_folders_is_followed(run: Folder, asked: Client) -> None:
    place = run.root / "traces"
    place.rename(run.root.parent / "elsewhere")
    place.symlink_to(run.root.parent / "elsewhere")
    assert asked.json(f"/api/runs/{run.id}/rollouts", step=3)["total"] == 16


@pytest.mark.parametrize("name", ["metrics.jsonl", "launcher.json", "traces/step_00000003.jsonl"])
def test_pipe_does_not_block_server(run: Folder, asked: Client, name: str) -> None:
    (run.root / name).unlink(missing_ok=True)
    os.mkfifo(run.root / name)
    assert 403 in {get(asked, f"/api/runs/{run.id}{answer}")[0] for answer in ANSWERS}


def test_secrets_are_removed_from_responses(run: Folder, asked: Client) -> None:
    run.config(wandb={"password": "swordfish9"}, note=f"with {SECRET}", url="https://me:swordfish9@host/x")
    message = f"could not log in: Authorization: Bearer swordfish9swordfish9 and {SHAPED}"
    run.write("logs/attempt_0001/trainer/error.json", {"exit_code": 1, "message": message})
    texts = [{"role": "user", "content": f"say {SECRET} and {SHAPED}"}]
    calls = [{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": SHAPED}}]}]
    run.lines(
        "traces/step_00000003.jsonl", [rollout(0, m, messages=texts + calls, metrics={SHAPED: 1.0}) for m in (0, 1)]
    )
    served = [get(asked, f"/api/runs/{run.id}{answer}") for answer in (*ANSWERS, "/rollouts/0/diff/1?step=3")]
    other = made(run.root.parent / "other", password="swordfish9")
    compared = asked.get("/api/compare", run=[run.id, other.id])
    everything = b"\n".join([*(body for _, body in served), compared.body, asked.get("/api/runs").body])
    assert {status for status, _ in served} == {200}
    assert compared.status == 200
    for secret in (SECRET, SHAPED, "swordfish9", "opensesame1"):
        assert secret.encode() not in everything, secret
    assert b"<removed>" in everything


def test_code_written_by_model_is_not_redacted(run: Folder, asked: Client) -> None:
    code = "token = next(tokens)\npassword: str = input()"
    run.lines("traces/step_00000003.jsonl", [rollout(0, 0, messages=[{"role": "assistant", "content": code}])])
    assert asked.json(f"/api/runs/{run.id}/rollouts/0", step=3)["turns"][0]["text"] == code


@pytest.mark.parametrize("host", ["127.0.0.1:8765", "localhost", "LOCALHOST:1", "[::1]:8765"])
def test_names_of_this_machine_are_answered(asked: Client, host: str) -> None:
    assert asked.get("/api/runs", headers={"host": host}).status == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example:8765", "", "[::2]", "localhost.evil:8765", "0.0.0.0:8765"]
)
def test_other_names_are_refused(asked: Client, host: str) -> None:
    for path in ("/", "/api/runs", "/api/events"):
        assert asked.get(path, headers={"host": host}).status == 421


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_write_methods_are_refused(asked: Client, method: str) -> None:
    assert asked.get("/api/runs", method=method).status == 405


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_cross_site_request_reads_no_data(asked: Client, site: str) -> None:
    assert asked.get("/api/runs", headers={"sec-fetch-site": site}).status == 403
    assert asked.get("/", headers={"sec-fetch-site": site}).status == 200, "a link to the page"


@pytest.mark.parametrize("path", ["/", "/api/runs", "/api/unknown", "/nothing"])
def test_responses_have_content_security_policy(asked: Client, path: str) -> None:
    headers = asked.get(path).headers
    policy = headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
    assert "unsafe" not in policy
    assert "http" not in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert "access-control-allow-origin" not in headers


def test_api_documentation_pages_are_disabled(asked: Client) -> None:
    assert {asked.get(path).status for path in ("/docs", "/redoc", "/openapi.json")} == {404}


def test_remote_page_requires_token(run: Folder, static: StaticFiles) -> None:
    asked, _ = client(run.root, static=static, token="t0ken")
    wrong = [{}, {"cookie": "rlrun_ui_8765=other"}, {"cookie": "rlrun_ui_1=t0ken"}, {"cookie": "\x00;;="}]
    for headers in wrong:
        assert asked.get("/api/runs", headers=headers).status == 401
    assert asked.get("/", token="other").status == 401
    assert asked.get("/api/runs", token="t0ken", headers={"sec-fetch-site": "cross-site"}).status == 403
    first = asked.get("/", token="t0ken", theme="dark", headers={"host": "gpu-7.example:8765"})
    assert (first.status, first.headers["location"]) == (303, "/?theme=dark")
    cookie = first.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=lax" in cookie
    kept = {"cookie": cookie.partition(";")[0], "host": "gpu-7.example:8765"}
    assert asked.get("/", headers=kept).status == 200
    assert asked.get("/api/runs", headers=kept).status == 200


def test_token_redirect_stays_on_host(run: Folder, static: StaticFiles) -> None:
    asked, _ = client(run.root, static=static, token="t0ken")
    for path in ("//evil.example", "/\\evil.example", "///evil.example/x"):
        assert asked.get(path, token="t0ken").headers["location"].startswith("/evil.example"), path


def test_guard_without_names_requires_token() -> None:
    with pytest.raises(ValueError, match="token"):
        Guard(None, names=None, token=None, port=1)  # type: ignore[arg-type]
