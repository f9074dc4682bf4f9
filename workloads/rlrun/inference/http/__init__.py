"""The engine's routes below `/rlrun`, and limits for its connections."""
