"""Example runs of the rendering tests, and functions that select parts of their manifests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlrun.api.resource import RLRunSpec
from rlrun.api.run_manifest import read_manifest
from rlrun_operator.render import (
    Host,
    RunContext,
    api_key_secret,
    render_prerequisites,
    render_workloads,
    spot_deployment,
)
from rlrun_operator.settings import RenderSettings

HERE = Path(__file__).parent
ROOT = HERE.parents[3]
MANIFESTS = {
    "quickstart": ROOT / "examples" / "quickstart.yaml",
    "gpu": HERE / "runs" / "gpu.yaml",
    "pod-template": HERE / "runs" / "pod-template.yaml",
}
ON_RECORD = {
    **MANIFESTS,
    "sft": ROOT / "examples" / "sft.yaml",
    "eval": ROOT / "examples" / "eval.yaml",
    "shared-guest": ROOT / "examples" / "shared-guest.yaml",
    "colocated": HERE / "runs" / "colocated.yaml",
    "spot": HERE / "runs" / "spot.yaml",
}
"""All examples, including interruptible nodes, no engines, no trainer, a shared trainer and colocated engines."""
HOSTS = {"shared-guest": ROOT / "examples" / "shared-host.yaml"}
HOST_UID = "99999999-8888-7777-6666-555555555555"
KEY = "the-key-of-the-run"
SETTINGS = RenderSettings()


def example(name: str, attempt: int = 1) -> RunContext:
    """Render context of a run of `ON_RECORD`."""
    run = read_manifest(ON_RECORD[name])
    uid, host = "11111111-2222-3333-4444-555555555555", None
    if name in HOSTS:
        of = read_manifest(HOSTS[name])
        host = Host(of.metadata.name, HOST_UID, of.spec, 3)
    return RunContext(run.metadata.name, "team-a", uid, run.spec, attempt, SETTINGS, host)


def context(blocks: dict[str, Any] | None = None, *, attempt: int = 1, name: str = "run") -> RunContext:
    """Render context of a minimal run with additional spec blocks (camelCase as in YAML)."""
    return RunContext(name, "team-a", "uid-1", make_spec(blocks), attempt, SETTINGS)


def make_spec(blocks: dict[str, Any] | None = None) -> RLRunSpec:
    """Spec of a minimal run with additional blocks."""
    smallest: dict[str, Any] = {"model": {"path": "/models/a"}}
    if (blocks or {}).get("task") != "SFT":
        smallest["environments"] = [{"id": "reverse-text"}]
    return RLRunSpec.model_validate(smallest | (blocks or {}))


def everything(ctx: RunContext) -> list[dict[str, Any]]:
    """All children in creation order."""
    create, apply = render_prerequisites(ctx)
    key = [api_key_secret(ctx, KEY)] if ctx.host is None else []
    spot = spot_deployment(ctx)
    found = [*create, *key, *apply, *render_workloads(ctx).existing, *((spot,) if spot is not None else ())]
    return [dict(manifest) for manifest in found]


def find_child(ctx: RunContext, kind: str, name: str | None = None) -> dict[str, Any]:
    """Return the only child of a kind (and name)."""
    found = [m for m in everything(ctx) if m["kind"] == kind and name in (None, m["metadata"]["name"])]
    assert len(found) == 1, [m["metadata"]["name"] for m in found]
    return found[0]


def pods(ctx: RunContext) -> dict[str, dict[str, Any]]:
    """Pod metadata and spec of each role. The run must have all roles."""
    trainer, inference, orchestrator = render_workloads(ctx)
    assert trainer is not None
    assert inference is not None
    return {
        "trainer": trainer["spec"]["template"],
        "inference": inference["spec"]["template"],
        "orchestrator": dict(orchestrator),
    }


def container(ctx: RunContext, role: str) -> dict[str, Any]:
    """Main container of a role."""
    return next(c for c in pods(ctx)[role]["spec"]["containers"] if c["name"] == role)


def read_environment(ctx: RunContext, role: str, pod: str) -> dict[str, str]:
    """Environment variables of a role's container, with field and secret references resolved for `pod`."""
    fields = {"metadata.namespace": ctx.namespace, "metadata.name": pod, "status.podIP": "10.0.0.9"}
    result = {}
    for variable in container(ctx, role)["env"]:
        source = variable.get("valueFrom", {})
        if "fieldRef" in source:
            result[variable["name"]] = fields[source["fieldRef"]["fieldPath"]]
        elif "secretKeyRef" in source:
            secret = api_key_secret(ctx, KEY)
            if source["secretKeyRef"]["name"] != secret["metadata"]["name"]:
                assert source["secretKeyRef"]["name"].startswith("for-rlrun-"), "a Secret of the user's own"
                continue
            result[variable["name"]] = secret["stringData"][source["secretKeyRef"]["key"]]
        else:
            result[variable["name"]] = variable["value"]
    return result
