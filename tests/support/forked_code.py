"""Run code as `python -c CODE WORD...` does, in a forked program: `python -m tests.support.forked_code CODE WORD...`."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    code = sys.argv.pop(1)
    exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
