"""Reports of a process that ends or hangs, and named points at which tests let one fail."""
