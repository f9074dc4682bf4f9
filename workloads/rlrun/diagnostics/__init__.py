"""Reports of a process that ends or hangs, and named points at which a test lets one fail."""
