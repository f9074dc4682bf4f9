"""`python -m rlrun.pod ROLE`, the same as `rlrun-pod ROLE`."""

import sys

from rlrun.pod.pod_command import main

sys.exit(main())
