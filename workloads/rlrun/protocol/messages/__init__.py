"""Messages between the roles: routes, ports, keys, documents, and token columns."""
