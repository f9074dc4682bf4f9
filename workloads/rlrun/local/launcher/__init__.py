"""One call of `rlrun local` in its parts: what it runs and says, the place of its processes, and their course."""
