"""Commands that the kernel kills when the thread that started them has ended, however that came (Linux)."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1
"""prctl(2): the signal that comes when the parent ends. It outlives exec."""


def tied(words: Sequence[str]) -> list[str]:
    """Return the command that becomes `words`. Start it in a thread that waits for it."""
    return [sys.executable, "-m", "argosy.processes.tied", str(os.getpid()), *words]


def main() -> None:
    """`python -m argosy.processes.tied PARENT COMMAND ...`."""
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # Ray blocks SIGINT in its workers
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(sys.argv[1]):  # it ended before
        sys.exit(1)
    os.execvp(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
