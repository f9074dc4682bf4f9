"""Process groups without torchrun, used by both ends of a weight transfer."""
