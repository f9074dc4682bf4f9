"""The product's container images, built from this checkout for the test cluster: `python -m tests.cluster.images build`.

An image is named after what is in it: `localhost/rlrun-trainer:KEY`, with the archive `<cache>/images/trainer-KEY.tar`, where KEY is
the hash of all that the build reads. So an image that is there is never built again, and one that is out of date is never taken.
"""

from .builder import IMAGES, BuiltImage, build

__all__ = ["IMAGES", "BuiltImage", "build"]
