"""Admission of runs as gangs: the operator creates all pods of a run if all of them fit, or none. Pure.

`admit.admit_runs` is the entry point and `queue_model` has its types. `packing` reads a run's pods, tracks free resources
and places a gang, `quota` limits it, `shares` orders runs by priority and share and explains waits, and `preemption` chooses victims.
"""
