"""Defaults of an administrator for the runs of a namespace. The operator applies them, and commands show the result.

`team` reads and applies the defaults, `judgement` reads a specification as the operator does, `words` limits the length of messages,
and `given` finds defaults in a file.
"""
