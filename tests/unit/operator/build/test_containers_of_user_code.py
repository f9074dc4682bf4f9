"""Containers that run user code (environments, rewards, warm-up) hold no secret of the run. Every rendered container must have an
entry in `RUNS_USER_CODE`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from rlrun_operator.render import RunContext
from tests.unit.operator.build.examples import HERE, ON_RECORD, context, everything, example

RUNS_USER_CODE = {
    "folder": False,
    "demonstrations": True,
    "model": False,
    "environment-code": False,
    "environments": True,
    r"environment-\d+": True,
    "trainer": False,
    "inference": False,
    "orchestrator": False,
}
"""Whether a container runs user code (environments, rewards or a warm-up), by container name. The orchestrator runs it with
`environments[].isolation: Process`, which `policy.environmentIsolation: Container` refuses."""
OF_USERS = {"pod-template": {"sidecar"}}
"""Containers that the podTemplate of an example adds."""
SHARED_FOLDERS = ("config", "credentials", "tmp", "home", "state", "shm")
"""Volumes with the configuration, a token, or files that a role executes or reads from its home."""


def with_secrets(role: str) -> dict[str, Any]:
    """A role's block with secrets in every supported form."""
    mounts = [{"name": "keys", "mountPath": "/keys"}, {"name": "modules", "mountPath": "/modules"}]
    volumes = [
        {"name": "keys", "secret": {"secretName": "for-rlrun-netrc"}},
        {"name": "modules", "emptyDir": {}},
    ]
    key = {"secretKeyRef": {"name": "for-rlrun-s3", "key": "secret"}}
    return {
        "env": [
            {"name": "AWS_SECRET_ACCESS_KEY", "valueFrom": key},
            {"name": "TEAM_TOKEN", "value": "secret-value"},
            {"name": "HF_ENDPOINT", "value": "https://mirror.example.com"},
        ],
        "envFrom": [{"secretRef": {"name": "for-rlrun-all"}}, {"configMapRef": {"name": "settings"}}],
        "podTemplate": {"spec": {"volumes": volumes, "containers": [{"name": role, "volumeMounts": mounts}]}},
    }


WARM = {"tiny": {"warmupEnvironment": "my_tasks:make", "warmupArgs": {"text": "$(RLRUN_API_KEY) costs $5"}}}
FULL: dict[str, Any] = {
    "model": WARM,
    "environments": [
        {"id": "my_tasks:make", "name": "shared", "variables": ["TEAM_TOKEN"]},
        {"id": "dataset", "args": {"reward": "my_rewards:score", "path": "/data/rows.jsonl"}},
        {"id": "my_tasks:make", "name": "own", "image": "registry.example.com/words:1"},
    ],
    "tracking": {
        "wandb": {"secretRef": {"name": "for-rlrun-wandb"}},
        "mlflow": {"uri": "https://mlflow.example.com", "secretRef": {"name": "for-rlrun-mlflow"}},
    },
    **{role: with_secrets(role) for role in ("trainer", "inference", "orchestrator")},
}


def is_user_code(name: str) -> bool:
    """Return whether a container runs user code; fail for an unknown container."""
    found = [is_user for pattern, is_user in RUNS_USER_CODE.items() if re.fullmatch(pattern, name)]
    assert len(found) == 1, f"container {name}: state in RUNS_USER_CODE whether it runs code of users"
    return found[0]


def iterate_containers(documents: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield each container of rendered manifests with its pod spec."""
    for document in documents:
        spec = document.get("spec") or {}
        spec = spec.get("template", {}).get("spec") or spec
        for kind in ("initContainers", "containers", "ephemeralContainers"):
            for container in spec.get(kind) or ():
                yield container, spec


def find_secrets(container: dict[str, Any], pod: dict[str, Any]) -> list[str]:
    """Ways in which a container gets a secret or the configuration of its run."""
    found = []
    for variable in container.get("env") or ():
        selector = (variable.get("valueFrom") or {}).get("secretKeyRef")
        if variable["name"] in ("RLRUN_API_KEY", "RLRUN_CONFIG") or selector is not None:
            found.append(f"variable {variable['name']}")
    found += [f"envFrom {source}" for source in container.get("envFrom") or () if "secretRef" in source]
    volumes = {volume["name"]: volume for volume in pod.get("volumes") or ()}
    for mount in container.get("volumeMounts") or ():
        volume = volumes[mount["name"]]
        if mount["name"] in SHARED_FOLDERS or not {"emptyDir", "persistentVolumeClaim"} & volume.keys():
            found.append(f"mount of {volume}")
        if mount["name"] == "data" and not mount.get("readOnly") and ".huggingface" not in mount["mountPath"]:
            found.append(f"right to write {mount['mountPath']}")
    return found


@pytest.mark.parametrize("name", ON_RECORD)
def test_user_code_container_of_example_holds_no_secret(name: str) -> None:
    documents = list(yaml.safe_load_all((HERE / "golden" / f"{name}.yaml").read_text()))
    assert len(list(iterate_containers(documents))) >= 2
    for container, pod in iterate_containers(documents):
        if container["name"] not in OF_USERS.get(name, ()) and is_user_code(container["name"]):
            assert find_secrets(container, pod) == [], (name, container["name"])


@pytest.mark.parametrize("task", ["RL", "Eval"])
def test_user_code_container_holds_none_of_many_secrets(task: str) -> None:
    blocks = {**FULL, "task": task}
    if task == "Eval":  # Eval has neither block
        del blocks["tracking"], blocks["trainer"]
    ctx = context(blocks)
    seen = {container["name"]: find_secrets(container, pod) for container, pod in iterate_containers(everything(ctx))}
    of_users = {name for name in seen if is_user_code(name)}
    assert of_users == {"environments", "environment-2", "demonstrations"}
    assert {name: seen[name] for name in of_users} == {name: [] for name in of_users}
    assert "variable RLRUN_API_KEY" in seen["model"], "the search finds the key if there is one"
    assert any("for-rlrun-netrc" in found for found in seen["orchestrator"])
    assert any("secretRef" in found for found in seen["orchestrator"])
    assert any(found.startswith("mount of") for found in seen["orchestrator"])


def find_demonstrations(ctx: RunContext) -> dict[str, Any]:
    (found,) = (c for c, _ in iterate_containers(everything(ctx)) if c["name"] == "demonstrations")
    return found


def test_demonstrations_get_no_secret_variables() -> None:
    found = find_demonstrations(context(FULL))
    values = {variable["name"]: variable.get("value") for variable in found["env"]}
    assert values["HF_ENDPOINT"] == "https://mirror.example.com"
    assert "TEAM_TOKEN" not in values
    assert found["envFrom"] == [{"configMapRef": {"name": "settings"}}]
    assert "$$(RLRUN_API_KEY) costs $$5" in str(values["RLRUN_WARMUP"]), "the kubelet would replace $(NAME)"


def test_hub_demonstrations_get_only_the_hub_token() -> None:
    sources = [
        {"secretRef": {"name": "for-rlrun-hub"}},
        {"configMapRef": {"name": "settings"}},
        {"prefix": "HF_", "secretRef": {"name": "for-rlrun-token"}},
    ]
    blocks = {"model": {"tiny": {"warmupEnvironment": "gsm8k"}}, "trainer": {"envFrom": sources}}
    env = find_demonstrations(context(blocks))["env"]
    found = {v["name"]: v["valueFrom"]["secretKeyRef"] for v in env if "secretKeyRef" in v.get("valueFrom", {})}
    assert all(selector["optional"] for selector in found.values())
    assert {(name, selector["name"], selector["key"]) for name, selector in found.items()} >= {
        ("RLRUN_CANDIDATE_000_HF_TOKEN", "for-rlrun-hub", "HF_TOKEN"),
        ("RLRUN_CANDIDATE_002_HF_TOKEN", "for-rlrun-token", "TOKEN"),
    }
    assert {selector["key"] for selector in found.values()} <= {
        *("HF_TOKEN", "HF_TOKEN_PATH", "HUGGING_FACE_HUB_TOKEN", "TOKEN", "TOKEN_PATH"),
    }


def test_demonstrations_use_pod_number_only_in_trainer_pods() -> None:
    """The number of an orchestrator's pod is its attempt, so attempt 2 must create demonstrations as well."""

    def names(ctx: RunContext) -> set[str]:
        return {variable["name"] for variable in find_demonstrations(ctx)["env"]}

    assert "RLRUN_POD_NAME" in names(example("quickstart"))
    assert "RLRUN_POD_NAME" not in names(example("eval", attempt=2))


def test_model_container_reads_demonstrations_file() -> None:
    (model,) = (c for c, _ in iterate_containers(everything(context(FULL))) if c["name"] == "model")
    assert {"name": "RLRUN_DEMONSTRATIONS", "value": "/run/rlrun-demonstrations/demonstrations.json"} in model["env"]
    (mount,) = (m for m in model["volumeMounts"] if m["name"] == "demonstrations")
    assert mount["readOnly"]


def test_demonstrations_precede_model_only_with_warmup() -> None:
    def names(ctx: RunContext) -> list[str]:
        return [
            c["name"]
            for c, _ in iterate_containers(everything(ctx))
            if c["name"] in ("folder", "demonstrations", "model")
        ]

    assert names(example("quickstart"))[:3] == ["folder", "demonstrations", "model"]
    assert "demonstrations" not in names(context({"model": {"tiny": {}}}))
    assert "demonstrations" not in names(example("shared-guest")), "its host makes the model"
