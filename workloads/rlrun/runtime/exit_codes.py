"""Exit codes of every role. 64 to 78 (sysexits) are permanent: a restart cannot help. Other codes are handled by the failure policy."""

from __future__ import annotations

OK = 0
FAILURE = 1
"""Failure that a restart may repair."""
STORAGE = 10
"""The volume refuses writes (full, read-only); a restart helps once there is space again."""
ATTEMPT_TAKEN = 11
"""The number of this attempt is already used on the volume; a restart with a higher number helps."""
USAGE = 64
"""The command line is wrong."""
DATA = 65
"""Data is wrong: a model folder without weights, a reward that is not a number, errors that dominate."""
UNAVAILABLE = 69
"""A port is in use, or a device is missing."""
CONFIGURATION = 78
"""The configuration is wrong."""
INTERRUPTED = 130
"""A signal ended a command (Ctrl-C); roles never exit with it."""
