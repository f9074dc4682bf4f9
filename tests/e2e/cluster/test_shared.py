"""Two runs that share a trainer, on a real cluster that enforces network policies."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from rlrun.protocol.files.shared_trainer_files import channel_of
from rlrun.protocol.messages import endpoints, trainer_channel
from tests.e2e.cluster.kube_run import KubeRun

Manifest = Callable[..., dict[str, Any]]
NewRun = Callable[[dict[str, Any]], KubeRun]
PYTHON = "/opt/rlrun/bin/python"
STEPS = 150
"""Steps of the guest; the host continues until the end of the test."""

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]


def guest_of(host: dict[str, Any], name: str, steps: int) -> dict[str, Any]:
    """Return a guest's manifest: the host's, with the fields that a guest may have for itself."""
    spec = {key: value for key, value in host["spec"].items() if key != "inference"}
    spec |= {"maxSteps": steps, "seed": 2, "trainer": {"sharedWith": host["metadata"]["name"], "lora": {"rank": 8}}}
    return host | {"metadata": {"name": name}, "spec": spec}


_ASK = """
import json, os, pathlib, sys, urllib.error, urllib.request
proof = json.loads(pathlib.Path("/data/host/shared/guest/state.json").read_text())["proof"]
own = os.environ["RLRUN_API_KEY"]
keys = {"own": own, "confirmed": f"guest.guest.{own}.{proof}", "another's": f"guest.other.{own}.{proof}"}
found = []
for key, url, body in json.loads(sys.argv[1]):
    data = None if body is None else json.dumps(body).encode()
    headers = {"Authorization": "Bearer " + keys[key], "Content-Type": "application/json"}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data=data, headers=headers), timeout=60) as answer:
            found.append(answer.status)
    except urllib.error.HTTPError as error:
        found.append(error.code)
for path in sys.argv[2:]:
    try:
        os.mkdir(path)
        found.append("done")
    except OSError as error:
        found.append(error.strerror)
print(json.dumps(found))
"""


def _reaches_its_own_part_alone(guest: KubeRun) -> None:
    trainer = f"http://host-trainer-0.host-trainer:{endpoints.TRAINER_PORT}"
    engine = f"http://host-inference:{endpoints.ENGINE_PORT}"
    mine, other = trainer + channel_of("guest"), trainer + channel_of("other")
    theirs = {"path": "/data/host/weights/v00000000.a0001", "version": 9_999_999}
    tries: list[tuple[str, str, Any, int]] = [
        ("own", mine + trainer_channel.STATE, None, 401),
        ("another's", mine + trainer_channel.STATE, None, 401),
        ("confirmed", mine + trainer_channel.STATE, None, 200),
        ("confirmed", other + trainer_channel.STATE, None, 403),
        ("confirmed", trainer + trainer_channel.STATE, None, 403),
        ("confirmed", trainer + trainer_channel.SHUTDOWN, {}, 403),
        ("confirmed", engine + endpoints.ENGINE_STATUS, None, 200),
        ("own", engine + endpoints.ENGINE_STATUS, None, 401),
        ("confirmed", engine + endpoints.ENGINE_UPDATE_WEIGHTS, theirs, 403),
        ("confirmed", engine + endpoints.ENGINE_RELOAD_WEIGHTS, {"version": 1}, 403),
        ("confirmed", engine + endpoints.ENGINE_SLEEP, {}, 403),
        ("confirmed", engine + "/v1/completions", {"prompt": "x"}, 403),
    ]
    folders = {
        "/data/host/shared/guest/x": "done",
        "/data/host/shared/other": "Read-only file system",
        "/data/host/weights/x": "Read-only file system",
    }
    asked = json.dumps([given[:3] for given in tries])
    pod = guest.pods("orchestrator")[0]["metadata"]["name"]
    said = guest.kubectl("exec", pod, "-c", "orchestrator", "--", PYTHON, "-c", _ASK, asked, *folders)
    found = json.loads(said)
    for given, answer in zip(tries, found, strict=False):
        assert answer == given[3], given
    assert found[len(tries) :] == list(folders.values())


def test_guest_survives_recreation_and_restart_of_host(new_run: NewRun, stub_manifest: Manifest) -> None:
    lora = {"lora": {"rank": 16, "slots": 2}, "guests": ["*"]}
    manifest = stub_manifest("host", {"trainer": {"stepSeconds": 0.2}}, steps=5000, trainer=lora)
    guest, host = new_run(guest_of(manifest, "guest", STEPS)), new_run(manifest)
    guest.apply()
    guest.wait("it says what it waits for", lambda: guest.status().get("reason") == "HostNotFound")
    host.apply()
    guest.wait_checkpoint(5)
    assert [pod["metadata"]["labels"]["rlrun.io/role"] for pod in guest.pods()] == ["orchestrator"]

    _reaches_its_own_part_alone(guest)
    before = host.identities()
    guest.delete()
    guest.apply()
    guest.wait("it continues", lambda: guest.step() > 5 and guest.status()["phase"] == "Running", steps=True)
    assert host.identities() == before, "nothing of the host is touched"
    status = guest.status()
    assert status["checkpoint"]["resumedFromStep"] >= 5
    assert status["restartsCountedTowardsMax"] == 0

    attempt = guest.attempt()
    host.kill_process("host-trainer-0", "trainer", "tests.support.stub.trainer")
    host.wait("attempt 2 of the host trains", lambda: host.attempt() == 2 and host.status()["phase"] == "Running")
    guest.wait("its next attempt trains", lambda: guest.attempt() > attempt and guest.status()["phase"] == "Running")

    final = guest.wait_phase("Complete")
    assert (final["progress"]["step"], final["restartsCountedTowardsMax"]) == (STEPS, 0)
    assert final["failures"][-1]["reason"] == "HostRestarted"
    host.wait("the host has forgotten it", lambda: "guests" not in host.status())
    status = host.status()
    assert (status["phase"], status["attempt"], status["restartsCountedTowardsMax"]) == ("Running", 2, 1)
