"""Control loop: watches fill the cache, and each changed run is observed, decided and written.

`reconciler` is one pass; `watch` is the only module that imports kopf.
"""
