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
        "an absolute path such as /data: names of letters, digits, '-', '_' and '.', without '/' at the end",
    ),
]
RESERVED_PATHS = (
    *("/bin", "/boot", "/dev", "/etc", "/home/rlrun", "/lib", "/lib64", "/opt/rlrun"),
    *("/proc", "/run", "/sbin", "/sys", "/tmp", "/usr", "/var/run"),
)
"""Folders of the image and of the pod: a volume there would hide them, or other programs would write into it."""
SubPath = Annotated[
    str,
    Field(min_length=1, max_length=512),
    Format(
        r"[A-Za-z0-9_][-A-Za-z0-9_.]*(/[A-Za-z0-9_][-A-Za-z0-9_.]*)*",
        "a folder of the volume such as team-a/runs: names of letters, digits, '-', '_' and '.', no '/' at its start or end",
    ),
]

AccessMode = Literal["ReadWriteOnce", "ReadWriteMany"]
"""Access modes of a claim. ReadWriteOncePod is excluded, because at least two pods share the volume."""


def _read_write_many() -> list[AccessMode]:
    return ["ReadWriteMany"]


class ClaimTemplate(Config):
    """A claim that the operator creates for the run."""

    storage_class_name: ObjectName | None = None
    """StorageClass. Default: the cluster's default StorageClass."""
    size: Capacity = "100Gi"
    """Requested capacity. It may grow at any time if the StorageClass allows it (`allowVolumeExpansion`)."""
    access_modes: Annotated[list[AccessMode], Field(min_length=1, max_length=2)] = Field(
        default_factory=_read_write_many
    )
    """ReadWriteMany: pods on several nodes. ReadWriteOnce: all pods on one node."""


class StorageSpec(Config):
    """The shared volume. Set `claimName` or `claimTemplate`, but not both. Default: a claim with the defaults of `claimTemplate`."""

    claim_name: ObjectName | None = None
    """An existing PersistentVolumeClaim in the run's namespace."""
    claim_template: ClaimTemplate | None = None
    """Create a claim named `<run>-data`; the default without `claimName`."""
    mount_path: MountPath = "/data"
    """Mount path in every pod; the run's folder is `<mountPath>/<run>`."""
    sub_path: SubPath | None = None
    """Folder of the volume to mount. Default: its root."""
    hub_cache: Literal["Run", "Volume"] = "Run"
    """Cache of hub models and data sets. Run: in the run's folder. Volume: on the volume, shared by all its runs."""
    mirror: MirrorConfig | None = None
    """Copies of checkpoints, exports and traces in object storage."""
    when_deleted: Literal["Retain", "Delete"] = "Retain"
    """What happens to a claim from `claimTemplate` when the run is deleted."""

    @property
    def template(self) -> ClaimTemplate | None:
        """Claim that the operator creates, or None if `claimName` names an existing claim."""
        return None if self.claim_name is not None else self.claim_template or ClaimTemplate()

    CEL_RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "!(has(self.claimName) && has(self.claimTemplate))",
            "set only one of claimName ({self.claimName}) and claimTemplate: both select the run's volume",
        ),
        Rule(
            f"!{list_cel(RESERVED_PATHS)}.exists(path, (self.mountPath + '/').startsWith(path + '/') || "
            "(path + '/').startsWith(self.mountPath + '/'))",
            "mountPath ({self.mountPath}) overlaps a folder of the image or of the pod; choose another path such as /data",
            ".mountPath",
        ),
        Rule(
            "self.whenDeleted != 'Delete' || !has(self.claimName)",
            "whenDeleted (Delete) needs claimTemplate, because a claim that the run did not create is never deleted; remove it",
            ".whenDeleted",
        ),
    )

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.claim_name is not None and self.claim_template is not None:
            raise ValueError(
                f"set only one of claimName ({self.claim_name}) and claimTemplate: both select the run's volume"
            )
        if any(_one_holds_the_other(self.mount_path, path) for path in RESERVED_PATHS):
            raise ValueError(
                f"mountPath ({self.mount_path}) overlaps a folder of the image or of the pod; choose another path such as /data"
            )
        if self.claim_name is not None and self.when_deleted == "Delete":
            raise ValueError(
                "whenDeleted (Delete) needs claimTemplate, because a claim that the run did not create is never deleted; remove it"
            )
        return self


def _one_holds_the_other(path: str, other: str) -> bool:
    return f"{path}/".startswith(f"{other}/") or f"{other}/".startswith(f"{path}/")


DEFAULT_STORAGE = StorageSpec(claim_template=ClaimTemplate())
