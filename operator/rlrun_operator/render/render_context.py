"""Inputs for rendering a run's children, and their common parts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import TypeVar

from pydantic import BaseModel

from rlrun.api.resolve import resolve_spec
from rlrun.api.resource import CLAIM_SIZE, LIVE_FIELDS, NEXT_ATTEMPT_FIELDS, RLRunSpec
from rlrun.api.run_fields import StorageSpec
from rlrun.config.loading.schema import snake_name
from rlrun.config.models.file_mark import file_mark
from rlrun.config.models.roles import TRAINING_TASKS
from rlrun.config.models.run_config import RunConfig
from rlrun.protocol.messages import endpoints
from rlrun_operator.names import GROUP, INSTANCE_LABEL, KIND, VERSION, Names, Role, child_labels
from rlrun_operator.settings import RenderSettings
from rlrun_operator.state import Json, Placed

B = TypeVar("B", bound=BaseModel)
ALL_ADDRESSES = "0.0.0.0"
"""Roles in pods listen on every address."""


@dataclass(frozen=True)
class Host:
    """The run whose trainer and engines a guest uses (`trainer.sharedWith`)."""

    name: str
    uid: str
    spec: RLRunSpec
    attempt: int
    """Attempt of the host: each restart of the host starts a new attempt of its guests."""

    @property
    def claim(self) -> str:
        """Name of the PersistentVolumeClaim that host and guests share."""
        return self.spec.storage.claim_name or Names(self.name).claim


@dataclass(frozen=True)
class RunContext:
    """One attempt of one run."""

    name: str
    namespace: str
    uid: str
    """UID of the RLRun: owner of its children, and identity of the run on its volume."""
    spec: RLRunSpec
    attempt: int
    settings: RenderSettings
    host: Host | None = None
    """Host of a guest; None: the run has its own trainer."""
    key_attempt: int = 0
    """Attempt that the run's API key was created for; 0: its first key."""
    known_hash: str | None = None
    """`spec_hash` of the specification if it is known: computing it takes as long as rendering a pod."""
    engine_count: int | None = None
    """Number of engines that autoscaling has chosen; None: as specified, or the first number."""
    excluded: tuple[str, ...] = ()
    """Nodes that trainer and orchestrator must not use. Engines ignore them, because they outlive attempts and are not recreated for
    this."""

    placed: Mapping[str, Placed] = field(default_factory=dict)
    """Additions of a queue to the pods of each role, and to the spot engines (`SPOT_SET`)."""

    @property
    def names(self) -> Names:
        """Names of the children."""
        return Names(self.name)

    @cached_property
    def spec_hash(self) -> str:
        """Hash of the specification (`spec_hash`)."""
        return self.known_hash or spec_hash(self.spec)

    @cached_property
    def config_text(self) -> str:
        """Text of the configuration file."""
        return self.config.model_dump_json(indent=1, by_alias=False) + "\n"

    @cached_property
    def _file_marks(self) -> dict[Role, str]:
        document = json.loads(self.config_text)
        engines, whole = file_mark(document, "inference"), file_mark(document, "orchestrator")
        return {"trainer": whole, "inference": engines, "orchestrator": whole}

    def file_mark(self, role: Role) -> str:
        """Return the hash of the part of the configuration file that a role uses."""
        return self._file_marks[role]

    @property
    def has_trainer(self) -> bool:
        """Whether the run has its own trainer: guests and evaluations have no trainer."""
        return self.host is None and self.spec.task in TRAINING_TASKS

    @property
    def has_engines(self) -> bool:
        """Whether the run has engines in separate pods: guests, supervised fine-tuning and colocated runs do not."""
        return self.host is None and self.spec.task != "SFT" and not self.colocated

    @property
    def model_maker(self) -> Role | None:
        """Role that creates the tiny model; None: the run has no tiny model, or its host creates it."""
        if self.host is not None or self.spec.model.tiny is None:
            return None
        return "trainer" if self.has_trainer else "orchestrator"

    @property
    def engine_total(self) -> int:
        """Number of the run's engines, including spot engines."""
        return self.engine_count or self.spec.inference.min_replicas

    @property
    def colocated(self) -> bool:
        """Whether an engine runs in each of the trainer's pods."""
        return self.spec.placement.colocate

    @property
    def storage(self) -> StorageSpec:
        """Settings of the volume: a guest's folder is next to its host's folder."""
        return self.host.spec.storage if self.host is not None else self.spec.storage

    @property
    def claim(self) -> str:
        """Name of the PersistentVolumeClaim that the roles share."""
        return self.host.claim if self.host is not None else self.spec.storage.claim_name or self.names.claim

    @property
    def folder(self) -> str:
        """Path of the run's folder in its pods."""
        return f"{self.storage.mount_path}/{self.name}"

    @property
    def serving(self) -> Names:
        """Names of the run that has the trainer and the engines: a guest's host, or the run itself."""
        return Names(self.host.name) if self.host is not None else self.names

    @property
    def key_secret(self) -> str:
        """Name of the Secret with the run's key, for its trainer and engines; a guest's orchestrator requests its slot with it."""
        return self.names.key_secret(self.uid, self.key_attempt)

    @property
    def first_trainer(self) -> str:
        """DNS name of the trainer's first pod."""
        return f"{self.serving.trainer_pod(0)}.{self.serving.trainer}.{self._namespace_domain}"

    @property
    def engines(self) -> str:
        """DNS name of all engines."""
        return f"{self.serving.inference}.{self._namespace_domain}"

    @cached_property
    def config(self) -> RunConfig:
        """Resolved configuration of all roles, with their addresses in the cluster."""
        resolved = resolve_spec(self.spec, name=self.name, uid=self.uid, output_dir=self.folder)
        trainer: dict[str, object] = {"host": ALL_ADDRESSES, "port": endpoints.TRAINER_PORT}
        if self.colocated:
            trainer["engine_urls"] = [f"http://127.0.0.1:{endpoints.ENGINE_PORT}"]
        orchestrator = {
            "host": ALL_ADDRESSES,
            "metrics_port": endpoints.ORCHESTRATOR_PORT,
            "trainer_url": f"http://{self.first_trainer}:{endpoints.TRAINER_PORT}",
        }
        engine = resolved.inference
        if self.spec.task != "SFT":
            orchestrator["inference_service"] = f"http://{self.engines}:{endpoints.ENGINE_PORT}"
        if engine is not None:
            engine = engine.model_copy(update={"host": ALL_ADDRESSES, "port": endpoints.ENGINE_PORT})
        return resolved.model_copy(
            update={
                "trainer": resolved.trainer.model_copy(update=trainer),
                "inference": engine,
                "orchestrator": resolved.orchestrator.model_copy(update=orchestrator),
            }
        )

    @property
    def _namespace_domain(self) -> str:
        return f"{self.namespace}.svc.{self.settings.cluster_domain}"


def spec_hash(spec: RLRunSpec) -> str:
    """Return a hash (16 hex digits) of the fields that children are rendered from, without fields whose edits take effect at once.

    Values that equal their default do not count either: neither a schema that fills in defaults nor a later release with more fields may
    make a running attempt look edited.
    """
    return _mark_without(spec, LIVE_FIELDS)


def former_spec_hashes(spec: RLRunSpec) -> frozenset[str]:
    """Return the hashes of this specification in earlier releases, without `spec_hash`: a run with such a hash was not edited.

    The size of the claim was part of the hash before claims could grow. `none` was the default of `trainer.activationCheckpointing`, so a
    written `none` was not part of the hash, and a written `auto` was. An edit from an unset field to `none` therefore applies only to the
    next attempt, which computes the same numbers.
    """
    former = [path for path in LIVE_FIELDS if path != CLAIM_SIZE]
    marks = (
        _mark_without(spec, former),
        _mark_without(spec, former, former_defaults=True),
        _mark_without(spec, LIVE_FIELDS, former_defaults=True),
    )
    return frozenset(marks) - {spec_hash(spec)}


def _mark_without(spec: RLRunSpec, live: Iterable[str], *, former_defaults: bool = False) -> str:
    for path in live:
        if path not in NEXT_ATTEMPT_FIELDS:
            spec = _with_default(spec, snake_name(path).split("."))
    document = spec.model_dump(mode="json", exclude_defaults=True)
    if former_defaults:
        trainer = document.setdefault("trainer", {})
        trainer["activation_checkpointing"] = spec.trainer.activation_checkpointing
        if trainer["activation_checkpointing"] == "none":
            del trainer["activation_checkpointing"]
        if not trainer:
            del document["trainer"]
    return document_mark(document)


def _with_default(block: B, path: list[str]) -> B:
    """Return `block` with the default value at `path`; unchanged if a block on this path is unset."""
    name, *rest = path
    if not rest:
        return block.model_copy(update={name: _default_value(type(block), name)})
    inner = getattr(block, name)
    return block if inner is None else block.model_copy(update={name: _with_default(inner, rest)})


@cache
def _default_value(block: type[BaseModel], name: str) -> object:
    """Return the default of a field. The value is shared, so it must not be changed."""
    return block.model_fields[name].get_default(call_default_factory=True, validated_data={})


def document_mark(document: object) -> str:
    """Return a hash (16 hex digits) of a JSON document."""
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:16]


@cache
def config_format() -> str:
    """Return the hash of the configuration file's format: roles of another release refuse unknown fields."""
    return document_mark(_without_prose(RunConfig.model_json_schema()))


def _without_prose(schema: object) -> object:
    """Return a JSON schema without titles and descriptions, which do not affect reading."""
    if isinstance(schema, list):
        return [_without_prose(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        k: _without_prose(v) for k, v in schema.items() if not (k in ("description", "title") and isinstance(v, str))
    }


def child_metadata(
    ctx: RunContext, name: str, role: Role | None = None, attempt: int | None = None, *, owned: bool = True
) -> Json:
    """Return the metadata of a child.

    Args:
        ctx: inputs for rendering.
        name: name of the child.
        role: role of the child; None: it belongs to no role.
        attempt: attempt of the child; None: it outlives attempts.
        owned: whether the child is deleted together with the run.
    """
    result: Json = {
        "name": name,
        "namespace": ctx.namespace,
        "labels": child_labels(ctx.name, role, attempt),
    }
    if owned:
        # `kubectl delete --cascade=foreground` waits for children that block. Setting it needs `update` on rlruns/finalizers.
        owner = {"apiVersion": f"{GROUP}/{VERSION}", "kind": KIND, "name": ctx.name, "uid": ctx.uid}
        result["ownerReferences"] = [{**owner, "controller": True, "blockOwnerDeletion": True}]
    else:
        # Argo CD prunes objects without an owner that have the tracking label of an Application, for example of the run's name.
        del result["labels"][INSTANCE_LABEL]
    return result
