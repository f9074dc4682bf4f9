"""State of a run and its causes, from a folder or from a cluster: typed snapshots, explanations, and their texts.

`snapshot` is the common data structure; `folder_reader` and `cluster_reader` read it, `why` explains it with `advice`, `screen` prints it.
"""
