"""Reports about processes that end or hang, and named points at which a test can make a process fail."""
