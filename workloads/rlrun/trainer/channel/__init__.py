"""HTTP channel of the trainer, served by rank 0: the server, the requests of one run, and the queue of its batches."""
