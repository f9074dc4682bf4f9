"""Several runs in one trainer: requests to join, and what keeps a guest's files and failures apart from the others."""
