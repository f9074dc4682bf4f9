"""Evaluation and synthesis against servers that are no engines of ours: any OpenAI-style API, hosted or one's own.

`client` is how they are named, `servers` asks them and decides what is tried again, `model` is one of them as an episode sees it, `job`
plans a command, and `play` asks what is not answered yet.
"""
