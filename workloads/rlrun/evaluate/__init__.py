"""Uses of policies besides training: `eval` measures them, `synthesize` writes their answers as a data set.

`policies` are found, `staging` makes them what an engine loads, `play` asks them what `answers` do not hold yet, `report` and `dataset`
give the result. The questions and the measures are those of the orchestrator's evaluation.
"""
