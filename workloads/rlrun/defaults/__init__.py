"""Defaults that an administrator gives to the runs of a namespace: the operator lays runs over them, and commands show what comes of it.

`team` reads and applies them, `judgement` reads a specification as the operator does, `words` bounds messages, `given` finds defaults
in a file.
"""
