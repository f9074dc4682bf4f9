"""Admission of runs as gangs: all pods of a run fit, or none is made. Pure.

`admit.admit_runs` is the entry, `model` its types. `rooms` has free resources, `fit` packs a gang, `shares` orders by priority and share,
`preempt` chooses victims, `words` explains a wait, and `gang` reads a run's pods from its manifests.
"""
