"""Runs as Python objects: `from rlrun import Run`. Builds, starts, follows and changes a run by what the commands use.

`run` has the object, `manifest` what it is made of, `blocks` the typed parts of a specification, `launch` the start on this machine, `acts`
the changes of a run that exists, `reading` what a run has written, `page` how a notebook shows it, `errors` how it fails.
"""
