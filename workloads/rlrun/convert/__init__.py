"""An RLRun manifest from what users of other trainers have: `readers` of their files, `tables` of their keys, `compose` of parts that
several keys decide, and the writer of a manifest whose comments account for every key.
"""
