"""Evaluation of policies (`eval`) and generation of data sets from their answers (`synthesize`).

`policies` finds policies, `staging` prepares their folders for engines, `play` collects from engines or servers the answers that `answers`
lacks, `report` and `sampled_rows` write the result. Questions and metrics are the same as in the orchestrator's evaluation.
"""
