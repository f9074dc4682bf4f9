"""Rewards that compute more than a comparison of texts, each with a time limit.

`bounded` runs plain functions in processes that can be killed, `mathematics` compares expressions, `code` runs programs in a sandbox, and
`judge` and `reward_model` request scores from a server.
"""
