"""Defaults of an administrator for the runs of a namespace. The operator applies them, and commands show the result.

`team_defaults` reads and applies the defaults and reads a specification as the operator does, and `given_defaults` finds defaults in a
file.
"""
