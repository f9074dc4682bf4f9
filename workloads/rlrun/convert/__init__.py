"""Conversion of other trainers' configurations into an RLRun manifest: `readers` of their files, `tables` of their keys, `compose` for
fields that several keys decide together, and the writer of a manifest whose comments list the result of every key.
"""
