"""What this machine can do for a run: facts that are gathered without starting one, and what each means."""
