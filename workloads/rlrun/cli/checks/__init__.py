"""Commands that look: at manifests, at environments and at this machine. They start no run and write nothing."""
