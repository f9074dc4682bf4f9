"""Checks of a valid specification: parts of Kubernetes objects, and values that conflict with others.

Pod templates and egress rules have no schema in a specification, and the API server rejects an invalid part only when the operator applies
the pods, long after `rlrun validate`. The checks find wrong names and types; the full validation is the API server's. Directives of a
strategic merge patch (`$patch`) are not checked.

Conflicting values are intervals beyond the last step, learning rates, GPUs, and secrets in clear text.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping

from rlrun.api.resource import RLRunSpec
from rlrun.config.base import Config
from rlrun.config.loading.fixes.repair import secret_reference
from rlrun.config.loading.fixes.written import to_yaml
from rlrun.config.loading.yaml_text import Key
from rlrun.config.suggest import did_you_mean
from rlrun.local.user_code import Finding
from rlrun.runtime.redact import is_secret, is_token

_ROLES = ("trainer", "inference", "orchestrator")
_TEMPLATE = ("apiVersion", "kind", "metadata", "spec")
_LISTS_OF_POD = (
    *("containers", "initContainers", "volumes", "tolerations", "imagePullSecrets", "hostAliases"),
    "topologySpreadConstraints",
)
_LISTS_OF_CONTAINER = ("env", "envFrom", "volumeMounts", "ports")
_RULE, _PORT = ("to", "ports"), ("port", "protocol", "endPort")
_PEER = ("podSelector", "namespaceSelector", "ipBlock")


def check_kubernetes_parts(spec: RLRunSpec) -> Iterator[Finding]:
    """Yield problems of pod templates and egress rules."""
    for role in _ROLES:
        template: Mapping[str, object] = getattr(spec, role).pod_template
        for message in _of_template(template, role):
            yield Finding((role, "pod_template"), message)
    for i, rule in enumerate(spec.network_policy.extra_egress):
        key: Key = ("network_policy", "extra_egress", i)
        yield from (Finding(key, message) for message in _of_egress(rule))


def _of_template(template: Mapping[str, object], role: str) -> Iterator[str]:
    for name, value in template.items():
        if name not in _TEMPLATE and not name.startswith("$"):
            inside = to_yaml({"spec": {name: value}})
            yield f"unknown field {name}: a pod template has metadata and spec; write podTemplate: {inside[:160]}"
    pod = template.get("spec")
    if pod is None:
        return
    if not isinstance(pod, Mapping):
        yield f"spec: got {to_yaml(pod)[:80]}, expected a mapping"
        return
    yield from _wrong_lists(pod, _LISTS_OF_POD, "spec")
    for name in ("containers", "initContainers"):
        containers = pod.get(name)
        for i, container in enumerate(containers if isinstance(containers, list) else ()):
            if isinstance(container, Mapping):
                yield from _of_container(container, f"spec.{name}[{i}]", role if name == "containers" else None)


def _of_container(container: Mapping[str, object], path: str, role: str | None) -> Iterator[str]:
    """Yield problems of a container. Of `containers`, only the role's own container needs no image."""
    name = container.get("name")
    if not isinstance(name, str):
        yield f"{path}: name is required" + (
            f"; the container of this role is named {role}" if role is not None else ""
        )
    elif role is not None and name != role and "image" not in container and "$patch" not in container:
        yield f"{path}: container {name} has no image; set image, or write name: {role} to change the role's own container"
    yield from _wrong_lists(container, _LISTS_OF_CONTAINER, path)


def _wrong_lists(block: Mapping[str, object], names: Collection[str], path: str) -> Iterator[str]:
    """Yield problems of fields that must be lists of mappings."""
    for name in names:
        value = block.get(name)
        if value is not None and not isinstance(value, list):
            yield f"{path}.{name}: got {to_yaml(value)[:80]}, expected a list; write a dash before each item"
        for i, item in enumerate(value if isinstance(value, list) else ()):
            if not isinstance(item, Mapping):
                yield f"{path}.{name}[{i}]: got {to_yaml(item)[:80]}, expected a mapping"


def _of_egress(rule: Mapping[str, object]) -> Iterator[str]:
    yield from _unknown_fields(rule, _RULE, "a rule")
    for name, known in (("ports", _PORT), ("to", _PEER)):
        value = rule.get(name)
        if value is not None and not isinstance(value, list):
            yield f"{name}: got {to_yaml(value)[:80]}, expected a list; write a dash before each item"
        for i, item in enumerate(value if isinstance(value, list) else ()):
            if isinstance(item, Mapping):
                yield from _unknown_fields(item, known, f"{name}[{i}]")
            else:
                such = (
                    f"; write {name}: [{{port: {to_yaml(item)}}}]" if name == "ports" and isinstance(item, int) else ""
                )
                yield f"{name}[{i}]: got {to_yaml(item)[:80]}, expected a mapping with {', '.join(known)}{such}"


def _unknown_fields(block: Mapping[str, object], known: Collection[str], what: str) -> Iterator[str]:
    for name in block:
        if name not in known:
            yield f"unknown field {name} of {what}{did_you_mean(name, known)}; known: {', '.join(known)}"


_GPU_ROLES = ("trainer", "inference")
_OF_FILES = re.compile(r"(?i)_(file|path|dir|folder|name|url|endpoint)$")
"""Endings of variables whose value is the location of a secret."""
_LARGE_RATE = 1.0
_NODE_GPUS = 8
"""GPUs of the largest common node."""


def find_contradictions(spec: RLRunSpec, run: str = "my") -> Iterator[Finding]:
    """Yield findings about values that conflict with others.

    Args:
        spec: specification of the run.
        run: name of the run, for the names of Secrets.
    """
    yield from _long_intervals(spec)
    yield from _switched_off(spec)
    yield from _large_rates(spec)
    yield from _unused_gpus(spec)
    yield from _mixed_devices(spec)
    yield from _crowded_node(spec)
    yield from _clear_secrets(spec, run)
    yield from _own_name(spec, run)
    yield from _web_mirrors(spec)
    yield from check_kubernetes_parts(spec)


def _long_intervals(spec: RLRunSpec) -> Iterator[Finding]:
    """Yield notices about intervals and warm-ups that exceed the last step."""
    if spec.task == "Eval":
        return
    last = spec.max_steps
    places: list[tuple[Key, Config | None, str, str]] = [
        (
            ("checkpoint",),
            spec.checkpoint if spec.checkpoint.enabled else None,
            "interval",
            "no checkpoint is saved before the last step",
        ),
        (("checkpoint", "export"), spec.checkpoint.export, "interval", "no version is exported at an interval"),
        (("evaluation",), spec.evaluation, "interval", "no evaluation is made between the first and the last step"),
        (
            ("data", "validation"),
            spec.data.validation if spec.data is not None else None,
            "interval",
            "no validation is made between steps",
        ),
        (("trainer", "scheduler"), spec.trainer.scheduler, "warmup_steps", "the learning rate never reaches its peak"),
    ]
    for key, block, name, effect in places:
        value = getattr(block, name, None)
        if block is None or name not in block.model_fields_set or value is None or value <= last:
            continue
        field = "warmupSteps" if name == "warmup_steps" else name
        fix = max(last // 10, 1) if name == "warmup_steps" else last
        yield Finding(
            (*key, name), f"({value}) is beyond maxSteps ({last}), so {effect}; write {field}: {fix}", notice=True
        )


def _switched_off(spec: RLRunSpec) -> Iterator[Finding]:
    """Yield notices about fields of checkpoints that are set although checkpoints are disabled."""
    block = spec.checkpoint
    for name in () if block.enabled else ("interval", "save_async", "keep_last", "keep_interval"):
        if name in block.model_fields_set and getattr(block, name) is not None:
            yield Finding(
                ("checkpoint", name),
                f"({to_yaml(getattr(block, name))}) has no effect: checkpoint.enabled is false; remove one of them",
                notice=True,
            )


def _own_name(spec: RLRunSpec, run: str) -> Iterator[Finding]:
    """Yield findings about the run's own name in fields for other runs."""
    for i, guest in enumerate(spec.trainer.guests):
        if guest == run:
            yield Finding(("trainer", "guests", i), f"({guest}) is this run, expected another run; remove it")
    if spec.trainer.shared_with == run:
        yield Finding(("trainer", "shared_with"), f"({run}) is this run, expected another run; remove it")


def _web_mirrors(spec: RLRunSpec) -> Iterator[Finding]:
    """Yield a finding about a mirror with a web address, to which files cannot be copied."""
    mirror = spec.storage.mirror
    if mirror is not None and mirror.url.startswith(("http://", "https://")):
        yield Finding(
            ("storage", "mirror", "url"),
            f"({mirror.url}) is a web address, to which files cannot be copied; write url: s3://BUCKET/FOLDER "
            "and set AWS_ENDPOINT_URL if the store is not Amazon's",
        )


def _large_rates(spec: RLRunSpec) -> Iterator[Finding]:
    """Yield findings about learning rates that are too large for any language model."""
    if spec.task == "Eval":
        return
    optimizer, critic = spec.trainer.optimizer, spec.algorithm.critic
    rates: list[tuple[Key, float, bool]] = [(("trainer", "optimizer", "lr"), optimizer.lr, optimizer.name == "sgd")]
    if critic is not None:
        rates.append((("algorithm", "critic", "lr"), critic.lr, optimizer.name == "sgd"))
    for key, rate, is_usual in rates:
        if rate >= _LARGE_RATE:
            yield Finding(
                key,
                f"({rate:g}) is a learning rate of 1 or more, which {optimizer.name} multiplies into every weight at each step; write "
                f"lr: {rate:g}e-6",
                notice=is_usual,
            )


def _unused_gpus(spec: RLRunSpec) -> Iterator[Finding]:
    """Yield findings about GPUs that the cluster would reserve without use, and about GPU fields of roles without GPUs."""
    for role in _GPU_ROLES:
        block = getattr(spec, role)
        if block.gpus_per_replica or spec.placement.colocate or spec.trainer.shared_with is not None:
            continue
        for kind in ("limits", "requests"):
            for name, count in getattr(block.resources, kind).items():
                if name == spec.placement.gpu_resource or name.endswith(("/gpu", ".com/gpu.shared")):
                    yield Finding(
                        (role, "resources", kind, name),
                        f"({count}) reserves GPUs, but {role}.gpusPerReplica is 0; remove it and write gpusPerReplica: {count}",
                    )
                    break
            else:
                continue
            break
    if not any(getattr(spec, role).gpus_per_replica for role in _GPU_ROLES):
        places: list[tuple[Key, str | None]] = [(("placement", "gpu_product"), spec.placement.gpu_product)]
        places += [
            (("placement", role, "gpu_product"), getattr(spec.placement, role).gpu_product) for role in _GPU_ROLES
        ]
        for key, product in places:
            if product:
                yield Finding(
                    key,
                    f"({product}) has no effect without GPUs; write gpusPerReplica: 1 for trainer and inference, or remove it",
                    notice=True,
                )


def _mixed_devices(spec: RLRunSpec) -> Iterator[Finding]:
    """Yield a notice about a role on CPUs next to one on GPUs: `gpusPerReplica` is often forgotten in one of them."""
    if spec.task != "RL" or spec.trainer.shared_with is not None:
        return
    on_cpus, on_gpus = sorted(_GPU_ROLES, key=lambda role: getattr(spec, role).gpus_per_replica > 0)
    if not getattr(spec, on_cpus).gpus_per_replica and (gpus := getattr(spec, on_gpus).gpus_per_replica):
        yield Finding(
            (on_cpus, "gpus_per_replica"),
            f"is 0, so the {on_cpus} pods compute on CPUs, but {on_gpus}.gpusPerReplica is {gpus}; write gpusPerReplica: 1 for GPUs",
            notice=True,
        )


def _crowded_node(spec: RLRunSpec) -> Iterator[Finding]:
    """Yield a notice about a volume that puts more GPUs on one node than most nodes have."""
    template = spec.storage.claim_template
    if template is None or "ReadWriteMany" in template.access_modes or spec.trainer.shared_with is not None:
        return
    roles = ("trainer",) if spec.placement.colocate else _GPU_ROLES
    gpus = sum(getattr(spec, role).replicas * getattr(spec, role).gpus_per_replica for role in roles)
    if gpus > _NODE_GPUS:
        yield Finding(
            ("storage", "claim_template", "access_modes"),
            f"(ReadWriteOnce) puts all pods on one node, which needs {gpus} GPUs; for several nodes write accessModes: [ReadWriteMany] "
            "and a storageClassName that supports it",
            notice=True,
        )


def _clear_secrets(spec: RLRunSpec, run: str) -> Iterator[Finding]:
    """Yield notices about secrets in clear text, which every reader of the run could see."""
    for role in _ROLES:
        for i, variable in enumerate(getattr(spec, role).env):
            if variable.value and _is_secret_value(variable.name, variable.value):
                yield _clear_text((role, "env", i), variable.name, run)
        yield from _secrets_of_template(role, getattr(spec, role).pod_template, run)
    for i, environment in enumerate(spec.environments):
        for name, value in environment.args.items():
            if isinstance(value, str) and value and _is_secret_value(name, value):
                yield Finding(
                    ("environments", i, "args", name),
                    f"contains a secret in clear text; put it into a Secret, pass it to the orchestrator as {_is_variable(name)} with "
                    f"envFrom, and write variables: [{_is_variable(name)}]",
                    notice=True,
                )


def _secrets_of_template(role: str, template: Mapping[str, object], run: str) -> Iterator[Finding]:
    spec = template.get("spec")
    for kind in ("containers", "initContainers"):
        containers = spec.get(kind) if isinstance(spec, Mapping) else None
        for container in containers if isinstance(containers, list) else ():
            variables = container.get("env") if isinstance(container, Mapping) else None
            for variable in variables if isinstance(variables, list) else ():
                name, value = (
                    (variable.get("name"), variable.get("value")) if isinstance(variable, Mapping) else (None, None)
                )
                if isinstance(name, str) and isinstance(value, str) and _is_secret_value(name, value):
                    yield _clear_text((role, "pod_template"), name, run)


def _is_secret_value(name: str, value: str) -> bool:
    return is_token(value) or (is_secret(name) and not _OF_FILES.search(name) and len(value) > 1)


def _clear_text(key: Key, name: str, run: str) -> Finding:
    return Finding(
        key,
        f"contains {name} in clear text; put it into a Secret (kubectl create secret generic {run}-keys --from-literal={name}=...) and "
        f"write {secret_reference(run, name)}",
        notice=True,
    )


def _is_variable(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "_", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)).upper()
