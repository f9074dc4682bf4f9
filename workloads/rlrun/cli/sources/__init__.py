"""The description of a run from files, options and variables, in our names and in those of other projects."""
