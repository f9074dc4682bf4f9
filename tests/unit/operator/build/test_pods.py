"""Pod fields rendered from the manifest: resources, images, variables, storage and probes."""

from __future__ import annotations

from typing import Any

import pytest

from rlrun_operator.render import RunContext, render_workloads
from rlrun_operator.settings import RenderSettings
from tests.unit.operator.build.examples import container, context, everything, example, find_child, make_spec, pods


def test_gpus_are_added_to_requests_and_limits() -> None:
    ctx = context(
        {"trainer": {"gpusPerReplica": 8, "resources": {"requests": {"cpu": "4"}, "limits": {"memory": "8Gi"}}}}
    )
    assert container(ctx, "trainer")["resources"] == {
        "limits": {"memory": "8Gi", "nvidia.com/gpu": "8"},
        "requests": {"cpu": "4", "nvidia.com/gpu": "8"},
    }
    assert "resources" not in container(ctx, "inference")


def test_custom_gpu_resource_is_requested_and_tolerated() -> None:
    ctx = context({"inference": {"gpusPerReplica": 1}, "placement": {"gpuResource": "amd.com/gpu"}})
    assert container(ctx, "inference")["resources"]["limits"] == {"amd.com/gpu": "1"}
    assert pods(ctx)["inference"]["spec"]["tolerations"] == [{"key": "amd.com/gpu", "operator": "Exists"}]
    assert "tolerations" not in pods(ctx)["trainer"]["spec"]


def test_model_container_exists_only_for_tiny_model() -> None:
    tiny = context(
        {"model": {"tiny": {}}, "trainer": {"gpusPerReplica": 2, "resources": {"requests": {"cpu": "2"}}}},
    )
    _, init = pods(tiny)["trainer"]["spec"]["initContainers"]
    assert init["command"][-2:] == ["rlrun-pod", "model"]
    assert init["resources"] == {"requests": {"cpu": "2"}}, "an init container needs no GPU"
    for others in (pods(context())["trainer"], pods(tiny)["inference"]):
        assert [c["name"] for c in others["spec"]["initContainers"]] == ["folder"]


def test_pod_without_gpus_hides_gpu_devices() -> None:
    ctx = context({"trainer": {"gpusPerReplica": 1}})
    hidden = {"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}
    assert hidden in container(ctx, "orchestrator")["env"]
    assert hidden not in container(ctx, "trainer")["env"]


def test_role_image_overrides_operator_default() -> None:
    images: dict[Any, str] = {"trainer": "t:1", "orchestrator": "o:1", "inference": "i:1"}
    settings = RenderSettings(images=images, image_pull_policy="Never")
    blocks = {"trainer": {"image": "own:2"}, "orchestrator": {"imagePullPolicy": "Always"}}
    ctx = RunContext("run", "team-a", "uid-1", make_spec(blocks), 1, settings)
    seen = {role: (container(ctx, role)["image"], container(ctx, role).get("imagePullPolicy")) for role in pods(ctx)}
    assert seen == {"trainer": ("own:2", None), "inference": ("i:1", "Never"), "orchestrator": ("o:1", "Always")}


def test_role_variable_replaces_default_variable() -> None:
    ctx = context({"trainer": {"env": [{"name": "HF_HOME", "value": "/x"}, {"name": "A", "value": "1"}]}})
    env = [(variable["name"], variable.get("value")) for variable in container(ctx, "trainer")["env"]]
    assert ("HF_HOME", "/x") in env
    assert ("A", "1") in env
    assert len({name for name, _ in env}) == len(env)


@pytest.mark.parametrize(("cache", "folder"), [("Run", "/mnt/run"), ("Volume", "/mnt")])
def test_hub_cache_is_per_run_unless_shared(cache: str, folder: str) -> None:
    ctx = context({"storage": {"claimName": "c", "mountPath": "/mnt", "hubCache": cache}})
    shared = {"name": "data", "mountPath": "/mnt/.huggingface", "subPath": ".huggingface"}
    for role in pods(ctx):
        assert {"name": "HF_HOME", "value": f"{folder}/.huggingface"} in container(ctx, role)["env"]
        assert (shared in container(ctx, role)["volumeMounts"]) == (cache == "Volume")


def list_writable_mounts(ctx: RunContext, role: Any) -> list[dict[str, Any]]:
    """Writable mounts of the run's volume in the role's container."""
    mounts = [m for m in container(ctx, role)["volumeMounts"] if m["name"] == "data"]
    assert mounts[0]["mountPath"] == ctx.storage.mount_path, "everything can be read"
    return [m for m in mounts if not m.get("readOnly")]


@pytest.mark.parametrize("above", [None, "team-a/runs"])
def test_run_creates_and_writes_only_its_own_folder(above: str | None) -> None:
    storage = {"claimName": "c", "mountPath": "/mnt"} | ({"subPath": above} if above else {})
    ctx = context({"storage": storage, "trainer": {"resources": {"limits": {"memory": "8Gi"}}, "gpusPerReplica": 1}})
    own = {"name": "data", "mountPath": "/mnt/run", "subPath": f"{above}/run" if above else "run"}
    for role, pod in pods(ctx).items():
        assert list_writable_mounts(ctx, role) == [own]
        first = pod["spec"]["initContainers"][0]
        own_folder = [word for word in first["command"] if not word.startswith("/mnt/run/.huggingface/")]
        assert own_folder[-3:] == ["rlrun-pod", "make-folders", "/mnt/run"]
        assert first["volumeMounts"] == [{"name": "data", "mountPath": "/mnt"} | ({"subPath": above} if above else {})]
        assert "env" not in first
        assert first.get("resources") == ({"limits": {"memory": "8Gi"}} if role == "trainer" else None)


def test_host_trainer_is_the_only_writer_of_guest_folders() -> None:
    ctx = context({"trainer": {"lora": {"rank": 4, "slots": 2}}})
    assert list_writable_mounts(ctx, "trainer") == [{"name": "data", "mountPath": "/data"}]
    for role in ("inference", "orchestrator"):
        assert [m["mountPath"] for m in list_writable_mounts(ctx, role)] == ["/data/run"]
    alone = context({"trainer": {"lora": {"rank": 4}}})
    assert [m["mountPath"] for m in list_writable_mounts(alone, "trainer")] == ["/data/run"]


def test_volume_subpath_and_shared_memory_size_are_rendered() -> None:
    ctx = context({"storage": {"claimName": "c", "subPath": "a/b"}, "trainer": {"sharedMemory": "2Gi"}})
    whole = {"name": "data", "mountPath": "/data", "subPath": "a/b", "readOnly": True}
    assert whole in container(ctx, "trainer")["volumeMounts"]
    volumes = pods(ctx)["trainer"]["spec"]["volumes"]
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "2Gi"}} in volumes
    assert {"name": "shm", "emptyDir": {"medium": "Memory"}} in pods(ctx)["inference"]["spec"]["volumes"]


def test_probes_allow_slow_model_load_and_unready_engine() -> None:
    engine = container(context(), "inference")
    startup, ready, live = (engine[f"{kind}Probe"] for kind in ("startup", "readiness", "liveness"))
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 3600
    assert ready["httpGet"]["path"] != live["httpGet"]["path"]
    assert live["periodSeconds"] * live["failureThreshold"] >= 120
    assert "livenessProbe" not in container(context(), "trainer")


def test_workloads_have_update_and_restart_policy_of_their_role() -> None:
    trainer, inference, orchestrator = render_workloads(context({"trainer": {"replicas": 2}}))
    assert (trainer["spec"]["podManagementPolicy"], trainer["spec"]["updateStrategy"]) == (
        "Parallel",
        {"type": "OnDelete"},
    )
    assert trainer["spec"]["replicas"] == 2
    assert inference["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": "100%"}, (
        "the GPUs of a new engine are those of an old one, and no attempt has engines of two renderings"
    )
    assert trainer["spec"]["template"]["spec"]["restartPolicy"] == "Always"
    assert orchestrator["spec"]["restartPolicy"] == "Never"


@pytest.mark.parametrize("name", ["quickstart", "gpu"])
def test_run_has_at_most_15_objects(name: str) -> None:
    assert len(everything(example(name))) <= 15


def test_claim_follows_its_template() -> None:
    template = {"storageClassName": "fast", "size": "5Gi", "accessModes": ["ReadWriteOnce"]}
    claim = find_child(context({"storage": {"claimTemplate": template}}), "PersistentVolumeClaim")
    assert claim["spec"] == {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": "5Gi"}},
        "storageClassName": "fast",
    }


IMAGES = [
    {"id": "reverse-text"},
    {"id": "verifiers:word-chain", "image": "team/word-chain:3", "python": "/venv/bin/python"},
    {"id": "arithmetic", "image": "team/sums:1", "volumePaths": ["datasets/sums", "shared.jsonl", "datasets/sums"]},
]


def test_environment_image_becomes_sidecar_without_secrets() -> None:
    ctx = context({"environments": IMAGES, "orchestrator": {"image": "mine:1"}})
    spec = pods(ctx)["orchestrator"]["spec"]
    _, code, chain, sums, shared = spec["initContainers"]
    assert shared["name"] == "environments"
    assert (code["image"], code["command"]) == ("mine:1", ["rlrun-pod", "share-code", "/run/rlrun-environments/code"])
    assert [(c["name"], c["image"], c["restartPolicy"]) for c in (chain, sums)] == [
        ("environment-1", "team/word-chain:3", "Always"),
        ("environment-2", "team/sums:1", "Always"),
    ]
    assert (chain["command"][0], sums["command"][0]) == ("/venv/bin/python", "python3")
    assert chain["command"][-1] == "/run/rlrun-environments/1/socket"
    main = container(ctx, "orchestrator")
    assert {"name": "RLRUN_ENVIRONMENT_SOCKETS", "value": "/run/rlrun-environments"} in main["env"]
    for sidecar in (code, chain, sums):
        assert main["securityContext"].items() <= sidecar["securityContext"].items()
        assert not [v for v in sidecar.get("env", ()) if "valueFrom" in v]
    assert [c["securityContext"].get("runAsUser") for c in (code, chain, sums)] == [None, 1002, 1003]
    plain = context({"environments": [{"id": "reverse-text"}]})
    assert [c["name"] for c in pods(plain)["orchestrator"]["spec"]["initContainers"]] == ["folder", "environments"]
    assert "RLRUN_ENVIRONMENT_SOCKETS" not in str(pods(plain))


def test_tracker_keys_reach_only_the_orchestrator_container() -> None:
    ctx = context(
        {
            "task": "SFT",
            "model": {"tiny": {}},
            "data": {"sources": [{"path": "/rows"}]},
            "tracking": {
                "wandb": {"secretRef": {"name": "for-rlrun-wandb"}},
                "mlflow": {"credentials": "Password", "secretRef": {"name": "for-rlrun-mlflow", "optional": True}},
            },
        }
    )
    found = [
        (inner["name"], variable["name"], variable["valueFrom"]["secretKeyRef"])
        for made in render_workloads(ctx).existing
        for pod in [made["spec"].get("template", made)["spec"]]
        for inner in [*pod["containers"], *pod["initContainers"]]
        for variable in inner.get("env", ())
        if variable["name"].startswith(("WANDB", "MLFLOW"))
    ]
    mlflow = {"name": "for-rlrun-mlflow", "optional": True}
    assert found == [
        ("orchestrator", "WANDB_API_KEY", {"name": "for-rlrun-wandb", "key": "WANDB_API_KEY"}),
        *(
            ("orchestrator", f"MLFLOW_TRACKING_{key}", {**mlflow, "key": f"MLFLOW_TRACKING_{key}"})
            for key in ("USERNAME", "PASSWORD")
        ),
    ]


def test_orchestrator_variable_overrides_tracker_secret() -> None:
    secret = {"valueFrom": {"secretKeyRef": {"name": "mine", "key": "k"}}}
    ctx = context(
        {
            "tracking": {"wandb": {"secretRef": {"name": "for-rlrun-wandb"}}},
            "orchestrator": {"env": [{"name": "WANDB_API_KEY", **secret}]},
        }
    )
    keys = [variable for variable in container(ctx, "orchestrator")["env"] if variable["name"] == "WANDB_API_KEY"]
    assert keys == [{"name": "WANDB_API_KEY", **secret}]


def test_environment_containers_share_no_writable_volume() -> None:
    storage = {"claimName": "team", "subPath": "exp", "mountPath": "/mnt/rl"}
    ctx = context({"environments": IMAGES, "storage": storage})
    spec = pods(ctx)["orchestrator"]["spec"]
    _, _, chain, sums, _ = spec["initContainers"]
    main = container(ctx, "orchestrator")

    def writes(of: Any) -> set[str]:
        return {mount["name"] for mount in of["volumeMounts"] if not mount.get("readOnly")}

    assert writes(chain) == {"environment-1", "environment-1-tmp"}
    assert writes(sums) == {"environment-2", "environment-2-tmp"}
    assert not (writes(main) | {"environment-code"}) & (writes(chain) | writes(sums))
    assert {m["name"] for m in main["volumeMounts"] if m["name"].startswith("environment")} == {
        "environment-1",
        "environment-2",
        "environments",
    }
    assert [m for m in chain["volumeMounts"] if m["name"] == "data"] == []
    assert [m for m in sums["volumeMounts"] if m["name"] == "data"] == [
        {"name": "data", "mountPath": f"/mnt/rl/{path}", "subPath": f"exp/{path}", "readOnly": True}
        for path in ("datasets/sums", "shared.jsonl")
    ]


def test_scratch_volumes_have_size_limits() -> None:
    spec = pods(context({"environments": IMAGES}))["orchestrator"]["spec"]
    empty = {v["name"]: v["emptyDir"] for v in spec["volumes"] if "emptyDir" in v and "medium" not in v["emptyDir"]}
    assert {"tmp", "home", "state", "environment-code", "environment-1", "environment-2-tmp"} <= set(empty)
    assert all(volume.get("sizeLimit") for volume in empty.values())
