"""What is done with policies besides training them: `eval` measures them, `synthesize` writes what they say as a data set.

`policies` are found, `staging` makes them what an engine loads, `play` asks them what `answers` do not hold yet, `report` and `dataset`
tell the result. The questions and the measures are those of the orchestrator's evaluation.
"""
