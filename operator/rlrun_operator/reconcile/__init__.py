"""The control loop: watched objects go to the cache, and a run that changed is observed, decided on and applied.

`reconciler` is one pass; `watch` is the only module that imports kopf.
"""
