"""Installation of the product into a cluster as documented: the two Helm charts, with images built from this checkout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.cluster.api import Cluster

CHARTS = Path(__file__).resolve().parents[2] / "charts"
SYSTEM = "rlrun-system"
RELEASE = "rlrun-operator"
INSTALL_SECONDS = 120.0
RESTRICTED = "pod-security.kubernetes.io/enforce=restricted"


def install(
    cluster: Cluster,
    images: Mapping[str, str],
    *,
    watch: Sequence[str] = ("default",),
    values: Mapping[str, str] | None = None,
    release: str = RELEASE,
    system: str = SYSTEM,
) -> None:
    """Install or upgrade the CRD and the operator, and wait until it is ready. The runs' namespaces have Pod Security
    `restricted`.

    Args:
        cluster: cluster to install into.
        images: references of `operator`, `trainer`, `orchestrator` and `inference`.
        watch: namespaces whose runs the operator serves.
        values: additional `--set` of the operator's chart.
        release: name of the operator's release; several may serve different namespaces.
        system: namespace of the operator.
    """
    for namespace in watch:
        if not cluster.kubectl("get", "namespace", namespace, "--ignore-not-found"):
            cluster.kubectl("create", "namespace", namespace)
        cluster.kubectl("label", "namespace", namespace, RESTRICTED, "--overwrite")
    cluster.helm("upgrade", "--install", "rlrun-crds", str(CHARTS / "rlrun-crds"), "--wait", timeout=INSTALL_SECONDS)
    settings = {
        "image": images["operator"],
        "images.trainer": images["trainer"],
        "images.orchestrator": images.get("orchestrator", images["trainer"]),
        "images.inference": images["inference"],
        "watchNamespaces": "{" + ",".join(watch) + "}",
        "readNodes": "true",
        **(values or {}),
    }
    sets = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    cluster.helm(
        "upgrade",
        "--install",
        release,
        str(CHARTS / "rlrun-operator"),
        "--namespace",
        system,
        "--create-namespace",
        "--wait",
        "--timeout",
        f"{INSTALL_SECONDS:.0f}s",
        *sets,
        timeout=INSTALL_SECONDS + 30,  # helm's own limit ends first: a killed helm would leave the release locked
    )
