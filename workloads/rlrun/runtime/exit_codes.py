"""Exit codes of every role. 64 to 78 (sysexits) are permanent: starting again cannot help; anything else goes to the failure policy."""

from __future__ import annotations

OK = 0
FAILURE = 1
"""Something broke that a restart may repair."""
STORAGE = 10
"""The volume refuses to write (full, read-only); a restart helps once there is space again."""
ATTEMPT_TAKEN = 11
"""This attempt's number was begun before on the volume; a restart with a higher number helps."""
USAGE = 64
"""The command line is wrong."""
DATA = 65
"""Data is wrong: a model folder without weights, a reward that is not a number, errors that dominate."""
UNAVAILABLE = 69
"""A port is in use, or a device is missing."""
CONFIGURATION = 78
"""The configuration is wrong."""
INTERRUPTED = 130
"""A signal has ended a command (Ctrl-C); no role ends so."""
