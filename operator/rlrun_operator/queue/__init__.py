"""Admission of runs as gangs: the operator creates all pods of a run if all of them fit, or none. Pure.

`admit.admit_runs` is the entry point and `model` has its types. `rooms` tracks free resources, `fit` packs a gang, `shares` orders runs by
priority and share, `preempt` chooses victims, `words` explains a wait, and `gang` reads a run's pods from its manifests.
"""
