"""Report about this machine: facts that are gathered without starting a run, and their meaning."""
