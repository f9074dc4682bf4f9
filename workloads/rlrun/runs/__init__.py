"""Runs as Python objects (`from rlrun import Run`): build, start, follow and change a run with the functions of the
commands.

`run` contains the object, `manifest` its manifest, `blocks` the typed parts of a specification, `launch` the start on
this machine, `acts` the changes of an existing run, `reading` the content of its volume, `page` its display in a
notebook, `errors` its errors.
"""
