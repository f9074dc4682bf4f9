"""Reports of a process that ends or hangs."""
