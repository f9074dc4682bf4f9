"""From files, command line and environment to a validated model, with every problem in the user's words."""
