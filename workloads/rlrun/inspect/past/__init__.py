"""The past of a run: the configurations that its attempts began with, and what changed between them."""
