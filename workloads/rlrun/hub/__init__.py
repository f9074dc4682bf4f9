"""Models and data sets of a hub: a commit that a run keeps, one download for all of its pods, and errors that name field and fix.

`repository` says what is meant, `revisions` which commit it is for this run, `fetch` brings the files into the hub's cache, `explain`
turns what the hub answers into a message.
"""
