"""What becomes of each key of another trainer: rows of data, one table per trainer, in the order in which they are looked up."""
