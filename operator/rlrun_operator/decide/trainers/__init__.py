"""Size of an elastic trainer: fewer pods while nodes are missing, and all pods again when there is room."""
