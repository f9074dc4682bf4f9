"""The web page for a team: runs of a cluster, to each user those that the API server lets that user get."""
