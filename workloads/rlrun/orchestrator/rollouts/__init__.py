"""Path from a prompt to a finished rollout: dispatch, conversations with an engine, tokens, and environments."""
