"""Everything slow that a cluster needs: Debian packages, then programs and images at the same time."""

from collections.abc import Sequence

from tests.cluster import binaries, prometheus
from tests.cluster.images import BuiltImage, build
from tests.cluster.progress import Progress
from tests.cluster.provider import detect_provider

from .together import run_together


def prepare(
    progress: Progress,
    *,
    images: Sequence[str] = (),
    kwok: bool = True,
    tests: bool = False,
    provider: str | None = None,
) -> dict[str, BuiltImage]:
    """Get the missing prerequisites of a cluster.

    Programs are compiled while images are built: the first needs the processor, the second mostly the network and the
    disk.

    Args:
        images: names of this checkout's images to build, and to unpack for clusters of this machine.
        kwok: whether the cluster has fake nodes.
        provider: name of the cluster's provider, or None for the first that works.
        tests: whether to get additional prerequisites of tests: Argo CD's code and Prometheus.

    Returns:
        The images by name.

    Raises:
        ClusterError: a prerequisite is not available; the message has the fix.
    """
    native = detect_provider(provider) == "native"
    if native:
        from tests.cluster.native import golden, lifecycle  # other providers work without this project's packages

        lifecycle.prepare_packages(progress)  # before both jobs: images are unpacked by containerd

    def get_programs() -> dict[str, BuiltImage]:
        if native:
            lifecycle.prepare(progress, kwok=kwok)
        else:
            binaries.find("kube", "helm", progress=progress)
        if tests:
            binaries.find(*binaries.OF_TESTS, progress=progress)
            with progress.step("prometheus"):
                prometheus.find(progress, download=True)
        return {}

    def get_images() -> dict[str, BuiltImage]:
        built = build(images, progress=progress) if images else {}
        if native:
            golden.add([image.archive for image in built.values()], progress)
        return built

    return run_together({"programs": get_programs, "images": get_images})["images"]
