"""Evaluation and synthesis with external servers: any OpenAI-compatible API, hosted or local.

`servers` configures the servers, sends requests and retries them. `served_play` plans a command, is the client of each episode, and is a
source of answers for `rlrun.evaluate.play`, which collects the missing ones.
"""
