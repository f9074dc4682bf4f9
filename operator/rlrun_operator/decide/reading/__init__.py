"""One object of an observation, read by itself: the run with its judgement and its written status, and the facts of a child. Pure."""
