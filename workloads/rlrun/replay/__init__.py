"""Any step of a run again: what the volume has for it, the step computed once more and compared, a sample explained, a run forked.

Nothing here writes into the run's folder.
"""
