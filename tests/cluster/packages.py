"""The Debian packages of the native provider: each is found by one file, and installed by apt-get if possible."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from .errors import ClusterError
from .preparation.commands import run, text_from
from .progress import Progress

# One file of each package. The paths of programs are searched in PATH and the sbin folders.
PACKAGES = {
    "containerd": "containerd",
    "runc": "runc",
    "containernetworking-plugins": "/usr/lib/cni/bridge",
    "iptables": "iptables",  # the portmap plugin and the kubelet call it
    "nftables": "nft",
    "conntrack": "conntrack",
    "iproute2": "ip",
    "util-linux": "unshare",
    "procps": "sysctl",
}
SEARCH_PATH = os.pathsep.join((os.environ.get("PATH", ""), "/usr/local/sbin", "/usr/sbin", "/sbin"))
APT_TRIES = 3  # another apt-get on the machine may clean the download folder under us


def missing_packages() -> list[str]:
    """Return the packages whose file is not on this machine."""
    return [name for name, proof in PACKAGES.items() if not _is_installed(proof)]


def ensure_packages(progress: Progress) -> None:
    """Install missing packages with apt-get, or explain how.

    Raises:
        ClusterError: a package is missing and this is not root on Debian, or apt-get failed.
    """
    missing = missing_packages()
    if not missing:
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise ClusterError(missing_message(missing))
    progress(f"apt-get install {' '.join(missing)}")
    install(missing, progress)
    if still := missing_packages():
        raise ClusterError(f"apt-get installed {' '.join(missing)}, yet {still[0]} does not bring {PACKAGES[still[0]]}")


def missing_message(missing: Iterable[str]) -> str:
    """Return the message for a user who has to install packages without help."""
    names = " ".join(missing)
    return f"the native cluster needs packages that are not installed. Install them: sudo apt-get install -y {names}"


def install(packages: Sequence[str], progress: Progress | None = None) -> None:
    """Run `apt-get install`; its package lists are fetched first if the first try fails.

    Args:
        packages: their names.
        progress: receiver of lines while apt-get runs; silent by default.

    Raises:
        ClusterError: apt-get failed every time; the message has its last lines.
    """
    command = ["apt-get", "install", "-y", "-q", "--no-install-recommends", "-o", "DPkg::Lock::Timeout=300", *packages]
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    progress, name = progress or Progress(lambda _: None), f"apt-get, {packages[0]} and {len(packages) - 1} others"
    with tempfile.TemporaryDirectory(prefix="rlrun-apt-") as folder:
        log = Path(folder) / "apt.log"
        for _ in range(APT_TRIES):
            if run(command, log, progress=progress, name=name, environment=environment) == 0:
                return
            tail = "\n".join(text_from(log).strip().splitlines()[-5:])
            if "dpkg --configure -a" in tail:  # an earlier installation was interrupted
                run(["dpkg", "--configure", "-a"], log, progress=progress, name="dpkg", environment=environment)
            run(["apt-get", "update", "-q"], log, progress=progress, name="apt-get update", environment=environment)
    raise ClusterError(f"{' '.join(command)} failed {APT_TRIES} times:\n{tail}")


def _is_installed(proof: str) -> bool:
    return Path(proof).exists() if proof.startswith("/") else shutil.which(proof, path=SEARCH_PATH) is not None


def unpack(package: str, scratch: Path) -> Path:
    """Return files of a Debian package that is downloaded and not installed, which needs no root.

    Args:
        package: its name.
        scratch: an empty folder for the download and the returned files.

    Raises:
        ClusterError: it cannot be downloaded.
    """
    command, said, unpacked = ["apt-get", "download", "-q", package], "", scratch / "files"
    for last in (False, True):
        result = subprocess.run(command, cwd=scratch, capture_output=True, text=True)
        if files := sorted(scratch.glob("*.deb")):
            subprocess.run(["dpkg-deb", "-x", str(files[0]), str(unpacked)], check=True, capture_output=True)
            return unpacked
        said = result.stderr.strip()
        if not last:  # the lists of packages are fetched first when the first try fails; this needs root
            subprocess.run(["apt-get", "update", "-q"], capture_output=True)
    raise ClusterError(f"{' '.join(command)} failed: {said[-300:]}; install the package {package}")
