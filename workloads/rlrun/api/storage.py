"""The volume that all roles share."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from rlrun.api.kubernetes import Capacity
from rlrun.config.base import Config
from rlrun.config.formats import Format, ObjectName
from rlrun.config.models.checkpoint import MirrorConfig
from rlrun.config.rule import Rule, list_cel

MountPath = Annotated[
    str,
    Field(min_length=2, max_length=512),
    Format(
        r"(/[A-Za-z0-9_][-A-Za-z0-9_.]*)+",
        "an absolute path such as /data: names of letters, digits, '-', '_' and '.', without '/' at its end",
    ),
]
RESERVED_PATHS = (
    *("/bin", "/boot", "/dev", "/etc", "/home/rlrun", "/lib", "/lib64", "/opt/rlrun"),
    *("/proc", "/run", "/sbin", "/sys", "/tmp", "/usr", "/var/run"),
)
"""Folders of the image and of the pod: a volume there would hide them, or be written by what takes them for its own."""
SubPath = Annotated[
    str,
    Field(min_length=1, max_length=512),
    Format(
        r"[A-Za-z0-9_][-A-Za-z0-9_.]*(/[A-Za-z0-9_][-A-Za-z0-9_.]*)*",
        "a folder of the volume such as team-a/runs: names of letters, digits, '-', '_' and '.', no '/' at its start or end",
    ),
]

AccessMode = Literal["ReadWriteOnce", "ReadWriteMany"]
"""ReadWriteOncePod is not among them: a run has at least two pods, and they share the volume."""


def _read_write_many() -> list[AccessMode]:
    return ["ReadWriteMany"]


class ClaimTemplate(Config):
    """A claim that the operator makes for the run."""

    storage_class_name: ObjectName | None = None
    """StorageClass; default: the cluster's."""
    size: Capacity = "100Gi"
    """Requested capacity; may grow at any time, where the StorageClass allows it (`allowVolumeExpansion`)."""
    access_modes: Annotated[list[AccessMode], Field(min_length=1, max_length=2)] = Field(
        default_factory=_read_write_many
    )
    """ReadWriteMany for pods on several nodes; ReadWriteOnce puts all on one node."""


class StorageSpec(Config):
    """The shared volume: `claimName` or `claimTemplate`, but not both. Default: a claim with the defaults of `claimTemplate`."""

    claim_name: ObjectName | None = None
    """An existing PersistentVolumeClaim of this namespace."""
    claim_template: ClaimTemplate | None = None
    """Make a claim named `<run>-data`; the default without `claimName`."""
    mount_path: MountPath = "/data"
    """Mount path in every pod; the run's folder is `<mountPath>/<run>`."""
    sub_path: SubPath | None = None
    """Folder of the volume that is mounted; default: its root."""
    hub_cache: Literal["Run", "Volume"] = "Run"
    """Cache of the hub's models and data sets: in the run's folder, or one on the volume that all its runs may write."""
    mirror: MirrorConfig | None = None
    """Copies of checkpoints, exports and traces in object storage."""
    when_deleted: Literal["Retain", "Delete"] = "Retain"
    """Fate of a claim made from `claimTemplate` when the run is deleted."""

    @property
    def template(self) -> ClaimTemplate | None:
        """Claim that the operator makes; None: `claimName` names an existing one."""
        return None if self.claim_name is not None else self.claim_template or ClaimTemplate()

    CEL_RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "!(has(self.claimName) && has(self.claimTemplate))",
            "claimName ({self.claimName}) and claimTemplate both say where the run's volume comes from; remove one of them",
        ),
        Rule(
            f"!{list_cel(RESERVED_PATHS)}.exists(path, (self.mountPath + '/').startsWith(path + '/') || "
            "(path + '/').startsWith(self.mountPath + '/'))",
            "mountPath ({self.mountPath}) is, or holds, a folder of the image or of the pod; choose another such as /data",
            ".mountPath",
        ),
        Rule(
            "self.whenDeleted != 'Delete' || !has(self.claimName)",
            "whenDeleted (Delete) needs claimTemplate: a claim that the run did not make is never deleted; remove it",
            ".whenDeleted",
        ),
    )

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.claim_name is not None and self.claim_template is not None:
            raise ValueError(
                f"claimName ({self.claim_name}) and claimTemplate both say where the run's volume comes from; remove one of them"
            )
        if any(_one_holds_the_other(self.mount_path, path) for path in RESERVED_PATHS):
            raise ValueError(
                f"mountPath ({self.mount_path}) is, or holds, a folder of the image or of the pod; choose another such as /data"
            )
        if self.claim_name is not None and self.when_deleted == "Delete":
            raise ValueError(
                "whenDeleted (Delete) needs claimTemplate: a claim that the run did not make is never deleted; remove it"
            )
        return self


def _one_holds_the_other(path: str, other: str) -> bool:
    return f"{path}/".startswith(f"{other}/") or f"{other}/".startswith(f"{path}/")


DEFAULT_STORAGE = StorageSpec(claim_template=ClaimTemplate())
