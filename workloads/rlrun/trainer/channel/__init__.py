"""The trainer's HTTP channel, which rank 0 alone serves: the server, one run's requests, and the queue of its batches."""
