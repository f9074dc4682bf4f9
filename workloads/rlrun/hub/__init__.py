"""Models and data sets of a hub: a fixed commit per run, one download for all of its pods, and errors with field and fix.

`repository` describes what to download, `revisions` stores its commit for this run, `fetch` downloads the files to the hub's cache, and
`explain` turns errors of the hub into messages.
"""
