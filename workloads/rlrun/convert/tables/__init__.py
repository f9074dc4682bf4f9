"""Fates of the keys of other trainers: rows of data, one table per trainer, in the order in which they are looked up."""
