"""Web page for a team: runs of a cluster; each user sees only the runs that the API server allows this user to get."""
