"""Choice among the three providers of a cluster: a given kubeconfig, kind, or the native provider.

The variable `RLRUN_PROVIDER` names one for all commands and tests of a process tree. CI sets it: a hosted runner has Docker and
kind, so that the first provider that works there is kind, and most tests on clusters need the native one.
"""

import os
import shutil
import subprocess
from collections.abc import Callable

from .errors import ClusterError

PROVIDERS = ("kubeconfig", "kind", "native")
VARIABLE = "RLRUN_PROVIDER"
DOCKER_TIMEOUT_S = 10.0


def choose_provider(wanted: str | None, *, kubeconfig: str, kind_works: Callable[[], bool]) -> str:
    """Return the provider to use.

    Args:
        wanted: provider that the caller requires.
        kubeconfig: the value of `RLRUN_KUBECONFIG`; empty if unset.
        kind_works: function that checks kind, called only if its answer matters.

    Raises:
        ClusterError: the wanted provider is unknown or cannot work.
    """
    if wanted is None:
        return "kubeconfig" if kubeconfig else "kind" if kind_works() else "native"
    if wanted not in PROVIDERS:
        raise ClusterError(f"provider {wanted!r}: use one of {', '.join(PROVIDERS)}")
    if wanted == "kubeconfig" and not kubeconfig:
        raise ClusterError("provider kubeconfig: set RLRUN_KUBECONFIG to the path of the cluster's kubeconfig")
    if wanted == "kind" and not kind_works():
        raise ClusterError(
            "provider kind: `kind` is not on PATH or Docker does not answer: install kind "
            "(https://kind.sigs.k8s.io), start Docker and see that `docker info` works"
        )
    return wanted


def detect_provider(wanted: str | None) -> str:
    """Return the provider for this machine, see `choose_provider`.

    Args:
        wanted: provider that the caller names. Default: the value of `RLRUN_PROVIDER`, else the first that works.

    Raises:
        ClusterError: `RLRUN_PROVIDER` has an unknown value, or the chosen provider cannot work.
    """
    named = os.environ.get(VARIABLE, "")
    if named and named not in PROVIDERS:
        raise ClusterError(f"{VARIABLE} is {named!r}: set it to one of {', '.join(PROVIDERS)}, or unset it")
    kubeconfig = os.environ.get("RLRUN_KUBECONFIG", "")
    return choose_provider(wanted or named or None, kubeconfig=kubeconfig, kind_works=kind_works)


def kind_works() -> bool:
    """Return whether kind is installed and the Docker daemon answers."""
    if shutil.which("kind") is None or shutil.which("docker") is None:
        return False
    try:
        return subprocess.run(["docker", "info"], capture_output=True, timeout=DOCKER_TIMEOUT_S).returncode == 0
    except subprocess.TimeoutExpired:
        return False
