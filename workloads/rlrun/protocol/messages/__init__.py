"""The messages between the roles: routes, ports, keys, documents, and columns of tokens."""
