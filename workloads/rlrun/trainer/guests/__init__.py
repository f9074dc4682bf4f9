"""Several runs in one trainer: requests to join, and isolation of a guest's files and failures."""
