"""Rewards that compute more than a comparison of texts, each with a time limit.

`bounded` runs plain functions in processes that can be killed, `mathematics` compares expressions, `code_execution` runs programs in a
sandbox, and `judge` and `scoring_servers` request scores from a server.
"""
