"""Evaluation and synthesis with external servers: any OpenAI-compatible API, hosted or local.

`client` configures the servers, `servers` sends requests and retries, `model` is the client of one episode, `job` plans
a command, and `play` collects the missing answers.
"""
