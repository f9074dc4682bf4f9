"""Models and data sets of a hub: a fixed commit per run, one download for all of its pods, and errors with field and fix.

`repository` names a repository and stores its commit for this run, `fetch` downloads the files to the hub's cache and turns errors of the
hub into messages, and `refused_models` refuses models before their weights are read.
"""
