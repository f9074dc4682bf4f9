"""The size of an elastic trainer: fewer pods while nodes are missing, and all of them again when there is room."""
