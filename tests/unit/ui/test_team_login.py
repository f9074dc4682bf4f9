"""Tokens, sessions and permissions over time: expiry, repeated reviews, limits and secrecy."""

from __future__ import annotations

import base64
import json
import logging
from concurrent.futures import ThreadPoolExecutor
from threading import Event, Semaphore
from typing import Any

import pytest
from loguru import logger

from rlrun.inspect.kubectl import ClusterError
from rlrun.ui import live
from rlrun.ui.guard import Redactor
from rlrun.ui.static_files import StaticFiles
from rlrun.ui.team.callers import ACCESS_REVIEWS, TOKEN_REVIEWS, Caller, Callers, Rights, SignedOutError, TooManyError
from rlrun.ui.team.cluster_api import RefusedError
from rlrun.ui.team.gate import Gate, parse_networks, peer_of
from rlrun.ui.team.team_server import Settings, make_team_app
from tests.support.made_runs import Client, Reply
from tests.support.team_cluster import ANN, API_SERVER, BOB, TeamCluster, two_teams

SAME = {"origin": "https://runs.example", "host": "runs.example", "content-type": "application/json"}


class Clock:
    """Clock that the test advances."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def teams() -> TeamCluster:
    return two_teams()


def gate(teams: TeamCluster, static: StaticFiles, **settings: Any) -> Gate:
    app = make_team_app(teams, Settings(**settings), static, Redactor({}))
    assert isinstance(app, Gate)
    return app


def log_in(asked: Client, token: str, path: str = "/api/login", **headers: str) -> Reply:
    return asked.get(path, method="POST", body=json.dumps({"token": token}).encode(), headers=SAME | headers)


def cookie(reply: Reply) -> dict[str, str]:
    return {"cookie": reply.headers["set-cookie"].partition(";")[0]}


def jwt(**claims: Any) -> str:
    return f"e30.{base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip('=')}.sig"


# ---- tokens


def test_token_review_is_cached_for_limited_time(teams: TeamCluster, clock: Clock) -> None:
    callers = Callers(teams, seconds=3600.0, clock=clock)
    for _ in range(3):
        assert callers.identify_user(ANN, "1").name == "ann"
    assert teams.count(TOKEN_REVIEWS) == 1
    del teams.users[ANN]
    clock.now += 59
    assert callers.identify_user(ANN, "1").name == "ann"
    clock.now += 2
    with pytest.raises(SignedOutError, match="has expired"):
        callers.identify_user(ANN, "1")


def test_token_review_cache_ends_at_token_expiry(teams: TeamCluster, clock: Clock) -> None:
    token = jwt(exp=105)
    teams.users[token] = teams.users.pop(ANN)
    callers = Callers(teams, clock=clock, epoch=lambda: 100.0)
    assert callers.identify_user(token, "1").name == "ann"
    del teams.users[token]
    clock.now += 6
    with pytest.raises(SignedOutError):
        callers.identify_user(token, "1")


@pytest.mark.parametrize("claims", [{}, {"exp": "soon"}, {"exp": None}, {"exp": [1]}, {"exp": 10**400}])
def test_token_without_readable_expiry_is_cached_normally(teams: TeamCluster, clock: Clock, claims: Any) -> None:
    token = jwt(**claims)
    teams.users[token] = teams.users[ANN]
    callers = Callers(teams, clock=clock, epoch=lambda: 100.0)
    assert [callers.identify_user(token, "1").name for _ in range(2)] == ["ann", "ann"]
    assert teams.count(TOKEN_REVIEWS) == 1


def test_rotated_token_is_reviewed_separately(teams: TeamCluster, clock: Clock) -> None:
    callers = Callers(teams, clock=clock)
    assert callers.identify_user(ANN, "1").name == "ann"
    teams.users["new"] = teams.users.pop(ANN)
    assert callers.identify_user("new", "1").name == "ann"
    assert teams.count(TOKEN_REVIEWS) == 2


def test_tokens_are_for_an_audience(teams: TeamCluster) -> None:
    teams.users[ANN]["audiences"] = ["rlrun"]
    assert Callers(teams, ["rlrun", "other"]).identify_user(ANN, "1").name == "ann"
    for audiences in ([], ["elsewhere"]):
        with pytest.raises(SignedOutError):
            Callers(teams, audiences).identify_user(ANN, "1")
    with pytest.raises(SignedOutError):
        Callers(teams, ["rlrun"]).identify_user(BOB, "1")


def test_authenticator_without_audience_support_is_rejected() -> None:
    class Old(TeamCluster):
        def post(self, path: str, body: Any) -> Any:
            return {"status": {"authenticated": True, "user": {"username": "ann"}}}

    assert Callers(Old()).identify_user("t", "1").name == "ann"
    with pytest.raises(SignedOutError, match="must have the audience rlrun"):
        Callers(Old(), ["rlrun"]).identify_user("t", "1")


@pytest.mark.parametrize("token", ["", "two words", "ümlaut", "line\nbreak", "x" * 20000])
def test_malformed_token_is_never_sent(teams: TeamCluster, token: str) -> None:
    with pytest.raises(SignedOutError, match="not a token"):
        Callers(teams).identify_user(token, "1")
    assert teams.count(TOKEN_REVIEWS) == 0


def test_guessing_peer_is_throttled_separately(teams: TeamCluster, clock: Clock) -> None:
    callers = Callers(teams, clock=clock)
    callers.identify_user(ANN, "guesses")
    for number in range(10):
        with pytest.raises(SignedOutError):
            callers.identify_user(f"guess-{number}", "guesses")
    with pytest.raises(TooManyError, match="again in 6 s") as refused:
        callers.identify_user("guess-10", "guesses")
    assert 0 < refused.value.seconds <= 6
    assert teams.count(TOKEN_REVIEWS) == 11, "the last one was not looked at"
    assert callers.identify_user(BOB, "another").name == "bob"
    clock.now += 31
    assert callers.identify_user(ANN, "guesses").name == "ann", "a token that was good before is no guess"
    for number in range(5):
        with pytest.raises(SignedOutError):
            callers.identify_user(f"later-{number}", "guesses")
    with pytest.raises(TooManyError):
        callers.identify_user("later-5", "guesses")


def test_distributed_guessing_is_throttled(teams: TeamCluster, clock: Clock) -> None:
    callers = Callers(teams, clock=clock)
    for number in range(100):
        with pytest.raises(SignedOutError):
            callers.identify_user(f"guess-{number}", f"peer-{number}")
    with pytest.raises(TooManyError):
        callers.identify_user("one more", "peer-7")


def test_distributed_guessing_does_not_block_new_user(teams: TeamCluster, clock: Clock) -> None:
    callers = Callers(teams, clock=clock)
    for number in range(400):
        with pytest.raises(SignedOutError):
            callers.identify_user(f"guess-{number}", f"peer-{number}")
    assert callers.identify_user(ANN, "a new address").name == "ann"
    with pytest.raises(SignedOutError):
        callers.identify_user("mistyped", "another new address")
    with pytest.raises(TooManyError):
        callers.identify_user("guess", "another new address")


def test_reviews_of_new_peers_are_limited_during_guessing(
    teams: TeamCluster, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    callers = Callers(teams, clock=clock)
    for number in range(100):
        with pytest.raises(SignedOutError):
            callers.identify_user(f"guess-{number}", f"peer-{number}")
    monkeypatch.setattr("rlrun.ui.team.callers._NEW_WAIT_SECONDS", 0.01)
    held, entered, release = [], Semaphore(0), Event()
    review = callers._request_review

    def slow(token: str) -> Caller | str:
        entered.release()
        release.wait(30)
        return review(token)

    monkeypatch.setattr(callers, "_request_review", slow)
    with ThreadPoolExecutor(4) as pool:
        held = [
            pool.submit(callers.identify_user, token, f"new-{i}")
            for i, token in enumerate((ANN, BOB, ANN + "x", BOB + "x"))
        ]
        for _ in held:
            assert entered.acquire(timeout=30)
        with pytest.raises(TooManyError):
            callers.identify_user("another", "new-5")
        release.set()
        assert held[0].result(30).name == "ann"


def test_repeated_expired_token_does_not_use_up_shared_tries(teams: TeamCluster, clock: Clock) -> None:
    callers = Callers(teams, clock=clock)
    refused = 0
    for _ in range(60):
        with pytest.raises((SignedOutError, TooManyError)) as caught:
            callers.identify_user("expired", "ingress")
        refused += isinstance(caught.value, TooManyError)
        clock.now += 5
    assert refused > 20, "and it is not looked at each time"
    assert teams.count(TOKEN_REVIEWS) < 20
    for number in range(9):
        with pytest.raises(SignedOutError):
            callers.identify_user(f"another-{number}", "ingress")
    teams.users["expired"] = teams.users[ANN]
    clock.now += 31
    assert callers.identify_user("expired", "ingress").name == "ann"


def test_many_repeated_tokens_are_throttled(teams: TeamCluster, clock: Clock) -> None:
    callers = Callers(teams, clock=clock)
    for _ in range(120):
        for number in range(10):
            with pytest.raises((SignedOutError, TooManyError)):
                callers.identify_user(f"guess-{number}", "guesses")
        clock.now += 1
    assert teams.count(TOKEN_REVIEWS) <= 10 * 6


def test_outage_does_not_count_as_failed_login(teams: TeamCluster, clock: Clock) -> None:
    callers = Callers(teams, clock=clock)
    teams.down = "timed out"
    for _ in range(20):
        with pytest.raises(ClusterError, match="timed out"):
            callers.identify_user(ANN, "1")
    teams.down = None
    assert callers.identify_user(ANN, "1").name == "ann"


def test_login_error_names_audience(teams: TeamCluster, static: StaticFiles) -> None:
    asked = Client(gate(teams, static, audiences=("rlrun-ui",)))
    assert asked.get("/api/me").json["problem"] == "log in with a token of the cluster, with the audience rlrun-ui"


# ---- rights


def test_access_review_is_cached_for_limited_time(teams: TeamCluster, clock: Clock) -> None:
    rights, ann = Rights(teams, 3600.0, clock), Caller("ann")
    for _ in range(3):
        assert rights.may_get_run(ann, "team-a", "demo")
    assert not rights.may_get_run(ann, "team-b", "demo")
    assert teams.count(ACCESS_REVIEWS) == 2
    teams.rights.clear()
    clock.now += 61
    assert not rights.may_get_run(ann, "team-a", "demo")


def test_users_of_one_name_and_other_groups_are_others(teams: TeamCluster, clock: Clock) -> None:
    rights = Rights(teams, clock=clock)
    for caller in (
        Caller("ann"),
        Caller("ann", groups=("x",)),
        Caller("ann", uid="2"),
        Caller("ann", extra=(("s", ("x",)),)),
    ):
        assert rights.may_get_run(caller, "team-a", "demo")
    assert teams.count(ACCESS_REVIEWS) == 4


def test_each_listed_run_is_reviewed_once(teams: TeamCluster, clock: Clock) -> None:
    rights = Rights(teams, clock=clock)
    runs = [("team-a", f"r{number}") for number in range(50)] + [("team-b", "r")]
    for _ in range(2):
        assert rights.allowed_runs(Caller("ann"), runs) == set(runs[:50])
    assert teams.count(ACCESS_REVIEWS) == 51


def test_outage_raises_error_instead_of_partial_list(teams: TeamCluster, clock: Clock) -> None:
    rights = Rights(teams, clock=clock)
    rights.allowed_runs(Caller("ann"), [("team-a", "demo")])
    teams.down = "gone"
    with pytest.raises(ClusterError):
        rights.allowed_runs(Caller("ann"), [("team-a", "demo"), ("team-a", "other")])


# ---- sessions


def test_login_cookie_contains_no_token(teams: TeamCluster, static: StaticFiles) -> None:
    asked = Client(gate(teams, static))
    reply = log_in(asked, ANN)
    assert reply.status == 204
    words = reply.headers["set-cookie"]
    assert words.startswith("__Host-rlrun=")
    assert {"HttpOnly", "Secure", "SameSite=lax", "Path=/"} <= set(words.split("; "))
    assert "Domain" not in words
    assert ANN not in words
    assert asked.get("/api/me", headers=cookie(reply)).json == {"user": "ann", "session": True}
    assert [row["id"] for row in asked.get("/api/runs", headers=cookie(reply)).json["runs"]] == ["team-a.demo"]
    assert asked.get("/api/me", headers={"authorization": f"bearer {BOB}"}).json == {"user": "bob", "session": False}


def test_session_ends_with_logout_or_token(teams: TeamCluster, static: StaticFiles) -> None:
    app = gate(teams, static, keep_seconds=0.0)
    asked = Client(app)
    first, second = cookie(log_in(asked, ANN)), cookie(log_in(asked, ANN))
    out = asked.get("/api/logout", method="POST", headers=SAME | first)
    assert (out.status, "Max-Age=0" in out.headers["set-cookie"]) == (204, True)
    assert asked.get("/api/me", headers=first).status == 401
    assert asked.get("/api/me", headers=second).status == 200
    del teams.users[ANN]
    ended = asked.get("/api/me", headers=second)
    assert (ended.status, ended.json["login"]) == (401, True)
    teams.users[ANN] = two_teams().users[ANN]
    app._callers._kept._values.clear()
    assert asked.get("/api/me", headers=second).status == 401, "it does not begin again"


def test_cookie_never_changes_its_user(teams: TeamCluster, static: StaticFiles) -> None:
    asked = Client(gate(teams, static))
    anns = cookie(log_in(asked, ANN))
    bobs = cookie(log_in(asked, BOB, **anns))
    assert anns != bobs
    assert asked.get("/api/me", headers=anns).status == 401
    assert asked.get("/api/me", headers=bobs).json["user"] == "bob"
    both = bobs | {"authorization": f"Bearer {ANN}"}
    assert asked.get("/api/me", headers=both).json == {"user": "ann", "session": False}, "what a proxy adds counts"
    assert asked.get("/api/me", headers=bobs | {"authorization": "Bearer x"}).status == 401, "and hides no cookie"


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"origin": "https://runs.example.evil"},
        {"origin": ""},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"sec-fetch-site": "none"},
    ],
)
def test_another_site_neither_logs_in_nor_out(teams: TeamCluster, static: StaticFiles, headers: dict[str, str]) -> None:
    asked = Client(gate(teams, static))
    mine = cookie(log_in(asked, ANN))
    assert log_in(asked, BOB, **headers).status == 403
    assert asked.get("/api/logout", method="POST", headers=SAME | headers | mine).status == 403
    assert asked.get("/api/me", headers=mine).status == 200


def test_login_without_origin_is_refused(teams: TeamCluster, static: StaticFiles) -> None:
    asked, body = Client(gate(teams, static)), json.dumps({"token": ANN}).encode()
    plain = {"content-type": "application/json"}
    assert asked.get("/api/login", method="POST", body=body, headers=plain).status == 403
    assert (
        asked.get("/api/login", method="POST", body=body, headers=plain | {"sec-fetch-site": "same-origin"}).status
        == 204
    )


@pytest.mark.parametrize(
    ("body", "kind", "status"),
    [
        (b"token=x", "application/x-www-form-urlencoded", 415),
        (b"{}", "text/plain", 415),
        (b"{}", "application/json", 422),
        (b"[1]", "application/json; charset=utf-8", 422),
        (b'{"token": 7}', "application/json", 422),
        (b"{", "application/json", 422),
        (b"[" * 60000, "application/json", 422),
        (b"x" * 70000, "application/json", 413),
        (b'{"token": "forged"}', "application/json", 401),
    ],
)
def test_malformed_login_is_refused(
    teams: TeamCluster, static: StaticFiles, body: bytes, kind: str, status: int
) -> None:
    reply = Client(gate(teams, static)).get(
        "/api/login", method="POST", body=body, headers=SAME | {"content-type": kind}
    )
    assert (reply.status, "set-cookie" in reply.headers) == (status, False)
    assert reply.json["problem"]


def test_throttled_login_has_retry_after_header(teams: TeamCluster, static: StaticFiles) -> None:
    asked = Client(gate(teams, static))
    found = [log_in(asked, f"guess-{number}") for number in range(11)]
    assert [one.status for one in found] == [401] * 10 + [429]
    assert 1 <= int(found[-1].headers["retry-after"]) <= 6
    assert asked.get("/api/me", headers={"authorization": "Bearer guess"}).status == 429


def test_trusted_proxy_users_are_throttled_separately(teams: TeamCluster, static: StaticFiles) -> None:
    here = parse_networks(["127.0.0.1"])
    asked = Client(gate(teams, static, trusted=here))
    found = [log_in(asked, f"guess-{n}", **{"x-forwarded-for": f"10.9.9.{n}, 192.0.2.7"}).status for n in range(11)]
    assert found == [401] * 10 + [429], "what a sender writes before the proxy's entry counts for nothing"
    assert log_in(asked, ANN, **{"x-forwarded-for": "192.0.2.8"}).status == 204
    asked = Client(gate(teams, static))
    found = [log_in(asked, f"more-{n}", **{"x-forwarded-for": f"192.0.2.{n}"}).status for n in range(11)]
    assert found == [401] * 10 + [429], "nobody is trusted by default"


def test_forbidden_namespace_of_service_account_is_not_disclosed(
    teams: TeamCluster, static: StaticFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = 'rlruns is forbidden: User "system:serviceaccount:rlrun-system:ui" cannot list in the namespace "team-b"'
    lines: list[str] = []
    number = logger.add(lines.append, level="WARNING")
    monkeypatch.setattr(teams, "get", lambda *_: (_ for _ in ()).throw(RefusedError(403, words)))
    asked = Client(gate(teams, static))
    try:
        for path in ("/api/runs", "/api/runs/team-a.demo", "/api/compare", "/readyz"):
            found = asked.get(path, headers={"authorization": f"Bearer {ANN}"}, run=["team-a.demo", "team-a.demo"])
            assert found.status == 503, path
            assert b"the service account of this page lacks a right in the cluster" in found.body, path
            assert b"team-b" not in found.body, path
            assert b"rlrun-system" not in found.body, path
    finally:
        logger.remove(number)
    assert words in "".join(lines)


@pytest.mark.parametrize("path", ["pods", "events"])
def test_unreadable_parts_do_not_disclose_namespace(
    teams: TeamCluster, static: StaticFiles, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    before = teams.get

    def get(where: str, query: Any = None) -> Any:
        if where.endswith(path):
            raise RefusedError(403, 'User "system:serviceaccount:rlrun-system:ui" cannot list')
        return before(where, query)

    monkeypatch.setattr(teams, "get", get)
    found = Client(gate(teams, static)).get("/api/runs/team-a.demo", headers={"authorization": f"Bearer {ANN}"})
    assert (found.status, b"rlrun-system" in found.body) == (200, False)
    assert any("the service account of this page lacks a right" in line for line in found.json["unread"])


@pytest.mark.parametrize(
    ("client", "forwarded", "peer"),
    [
        ("192.0.2.1", [], "192.0.2.1"),
        ("192.0.2.1", ["10.1.1.1"], "192.0.2.1"),
        ("10.0.0.1", ["192.0.2.9"], "192.0.2.9"),
        ("::ffff:10.0.0.1", ["192.0.2.9:4711"], "192.0.2.9"),
        ("10.0.0.1", ["6.6.6.6, 192.0.2.9", "10.0.0.2"], "192.0.2.9"),
        ("10.0.0.1", ["6.6.6.6, nonsense"], "10.0.0.1"),
        ("10.0.0.1", ["6.6.6.6, nonsense, 10.0.0.3"], "10.0.0.3"),
        ("10.0.0.1", ["10.0.0.3"], "10.0.0.3"),
        ("fd00::1", ["[2001:db8::5]:99"], "2001:db8::/64"),
        ("2001:db8:0:0:1::1", [], "2001:db8::/64"),
        (None, ["1.2.3.4"], "nobody"),
        ("testclient", ["1.2.3.4"], "testclient"),
    ],
)
def test_peer_address_comes_only_from_trusted_proxies(client: str | None, forwarded: list[str], peer: str) -> None:
    headers = [(b"x-forwarded-for", one.encode()) for one in forwarded]
    scope = {"type": "http", "client": client and (client, 1), "headers": headers}
    assert peer_of(scope, parse_networks(["10.0.0.0/8", "fd00::/8"])) == peer


def test_user_with_too_many_pages_gets_explanation(
    teams: TeamCluster, static: StaticFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "OF_ONE_MAX", 0)
    found = Client(gate(teams, static)).get("/api/events", headers={"authorization": f"Bearer {ANN}"})
    assert (found.status, "you have 0 open pages of this server" in found.json["problem"]) == (429, True)


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "POST"])
def test_other_methods_are_refused(teams: TeamCluster, static: StaticFiles, method: str) -> None:
    asked = Client(gate(teams, static))
    assert asked.get("/api/runs", method=method, headers={"authorization": f"Bearer {ANN}"}).status == 405
    assert asked.get("/api/login").status == 405


def test_cross_site_request_to_gate_is_refused(teams: TeamCluster, static: StaticFiles) -> None:
    asked = Client(gate(teams, static))
    headers = {"authorization": f"Bearer {ANN}", "sec-fetch-site": "cross-site"}
    assert asked.get("/api/runs", headers=headers).status == 403


def test_tokens_are_never_logged(teams: TeamCluster, static: StaticFiles, caplog: pytest.LogCaptureFixture) -> None:
    lines: list[str] = []
    number = logger.add(lines.append, level=0)
    try:
        with caplog.at_level(logging.DEBUG):
            asked = Client(gate(teams, static))
            mine = cookie(log_in(asked, ANN))
            log_in(asked, "forged-token")
            asked.get("/api/runs", headers={"authorization": "Bearer other-forged"})
            asked.get("/api/runs", headers=mine)
    finally:
        logger.remove(number)
    said = "".join(lines) + caplog.text
    assert "ann logged in" in said
    for secret in (ANN, "forged-token", "other-forged", mine["cookie"].partition("=")[2]):
        assert secret not in said


# ---- where it is


@pytest.mark.parametrize("stripped", [True, False])
def test_prefix_applies_to_cookie_and_paths(teams: TeamCluster, static: StaticFiles, stripped: bool) -> None:
    asked, before = Client(gate(teams, static, prefix="/rlrun")), "" if stripped else "/rlrun"
    reply = log_in(asked, ANN, f"{before}/api/login")
    words = reply.headers["set-cookie"]
    assert (words.startswith("__Secure-rlrun="), "Path=/rlrun/" in words) == (True, True)
    assert asked.get(f"{before}/api/me", headers=cookie(reply)).json["user"] == "ann"
    assert asked.get(f"{before}/").status == 200
    assert asked.get(f"{before}/healthz").status == 200
    assert asked.get("/rlrun").headers["location"] == "/rlrun/"
    assert asked.get("/rlrunner/api/me", headers=cookie(reply)).status == 404


def test_probes(teams: TeamCluster, static: StaticFiles) -> None:
    teams.down = "connection refused"
    asked = Client(gate(teams, static))
    assert asked.get("/healthz").status == 200
    assert (asked.get("/readyz").status, b"connection refused" in asked.get("/readyz").body) == (503, True)
    teams.down = None
    assert asked.get("/readyz").status == 200
    teams.down = "connection refused"
    assert asked.get("/readyz").status == 200, "an outage is said on the page"


@pytest.mark.parametrize("path", ["/", "/api/me", "/api/login", "/healthz", "/rlrun", "/nothing"])
def test_gate_responses_have_content_security_policy(teams: TeamCluster, static: StaticFiles, path: str) -> None:
    headers = Client(gate(teams, static, prefix="/rlrun")).get(path).headers
    assert headers["content-security-policy"].startswith("default-src 'none'")
    assert headers["x-frame-options"] == "DENY"
    assert "access-control-allow-origin" not in headers


def test_audience_of_api_server_is_the_default(teams: TeamCluster) -> None:
    teams.users[ANN]["audiences"] = [API_SERVER]
    assert Callers(teams).identify_user(ANN, "1").name == "ann"
