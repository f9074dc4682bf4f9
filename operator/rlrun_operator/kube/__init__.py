"""Access to the Kubernetes API: credentials, client, kinds of objects, bounded JSON, and a lock on a Lease."""
