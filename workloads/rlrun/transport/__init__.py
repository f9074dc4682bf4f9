"""Groups of processes that send tensors to each other without torchrun: what both ends of a weight hand-over share."""
