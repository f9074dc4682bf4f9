"""Rewards that need more than a comparison: mathematics, running code, asking a judge. Each within a deadline.

`bounded` runs plain functions in processes that can be killed, `mathematics` compares expressions, `code` runs programs
in a sandbox, `judge` asks a model.
"""
