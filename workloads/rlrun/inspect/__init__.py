"""State of a run and its causes, from its folder or from a cluster: typed snapshots, explanations, and their texts.

`snapshot` is the one shape of both; `folder` and `cluster` read it, `why` explains it with `advice`, `screen` writes it.
"""
