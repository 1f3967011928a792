"""NCCL's flight recorder of a node's workers: what each rank last asked of NCCL, written down when a world hangs.

Torch keeps the last collectives in a ring buffer, and writes them to a file when a byte comes through a named pipe
(torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, DumpPipe); both are asked for by environment variables, so no private
function is called. `torchfrtrace`, which comes with torch, reads the files. Gloo has no such recorder: there the
heartbeat's numbers of collectives begun serve.

What the user has set himself comes first. With TORCH_NCCL_DUMP_ON_TIMEOUT torch would also write when its own watchdog
times out; Argosy's detectors are earlier.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

ENTRIES = 2000
"""Collectives that are kept, a few hundred bytes each."""
PIPE, DUMP = "flight-", "flight/rank-"
"""How the names of the pipes in the agent's scratch folder and of the files in the run's folder of stacks begin."""


def environment(stacks: Path, scratch: Path) -> dict[str, str]:
    """Return the variables for a worker on a GPU, without those that are set."""
    wanted = {
        "TORCH_FR_BUFFER_SIZE": str(ENTRIES),
        "TORCH_FR_DUMP_TEMP_FILE": str(stacks / DUMP),
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": str(scratch / PIPE),
    }
    return {name: value for name, value in wanted.items() if name not in os.environ}


def ask(stacks: Path, scratch: Path, ranks: Iterable[int | None]) -> None:
    """Have these ranks write what their recorders hold; without a recorder there is no pipe, and nothing happens."""
    for rank in ranks:
        with suppress(OSError):
            pipe = os.open(scratch / f"{PIPE}{rank}.pipe", os.O_WRONLY | os.O_NONBLOCK)
            try:
                (stacks / DUMP).parent.mkdir(parents=True, exist_ok=True)
                os.write(pipe, b"1")
            finally:
                os.close(pipe)
