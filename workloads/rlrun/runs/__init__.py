"""Runs as Python objects (`from rlrun import Run`): build, start, follow and change a run with the functions of the
commands.

`run` contains the object, `written_manifest` its manifest, `blocks` the typed parts of a specification and the errors,
`run_process` the start on this machine, changes and waiting, `volume_reader` the content of its volume, `run_views` its
display in a notebook.
"""
