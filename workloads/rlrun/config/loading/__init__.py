"""Loading of files, command line and environment into a validated model, with messages about every problem."""
