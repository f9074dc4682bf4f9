"""The product's container images, built from this checkout for the test cluster: `python -m tests.cluster.images
build`.

An image is named after its content: `localhost/rlrun-trainer:KEY` with the archive `<cache>/images/trainer-KEY.tar`,
where KEY is the hash of all inputs of the build. So an existing image is never built twice, and an outdated one is
never used.
"""

from .builder import IMAGES, BuiltImage, build

__all__ = ["IMAGES", "BuiltImage", "build"]
