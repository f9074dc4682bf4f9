"""Cost of runs for people: of an RLRun as its status counts it, of a folder as its metrics show it."""
