"""Tables of other trainers' keys: rows of data, one table per trainer, in lookup order."""
