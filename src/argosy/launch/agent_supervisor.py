"""A node's agent, held: started again when it was killed or the run was stopped elsewhere, until the run has ended.

For engines that start nothing again by themselves, and for the containers of a cluster. What has become of the run
decides, as at the end of a batch job (`requeue`): an agent whose run is finished or has failed is not started again,
nor one that was started several times without a step more, nor one that was told to stop.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

from argosy.engines.jobset import FINAL_POD_CODES
from argosy.engines.record import LAUNCH_FOLDER, STOP_FILE
from argosy.errors import STOP_SIGNALS, Retryable, UnfitNode, heeded
from argosy.launch.requeue import AGENT_RESTARTS, last_step, outcome
from argosy.processes.supervisor import Restarts

FINAL_AGENT_CODES = {*FINAL_POD_CODES, UnfitNode.exit_code}
"""Exit codes of an agent with which another one would end as well."""


class AgentSupervisor:
    """Holds the agent of this node."""

    def __init__(self, run_dir: Path, command: list[str]):
        self._run_dir, self._command = run_dir, command
        self._process: subprocess.Popen[bytes] | None = None
        self._is_stopped = False
        self._pending: int | None = None
        """A signal that came while the agent was being started."""

    def supervise(self) -> int:
        """Return the exit code of the last agent; Retryable's if the run may go on when it is launched again."""
        for number in heeded(STOP_SIGNALS):
            signal.signal(number, self._pass_on)
        restarts, step = Restarts(AGENT_RESTARTS), last_step(self._run_dir)
        while True:
            code = self._run()
            if self._is_stopped or code in FINAL_AGENT_CODES:
                return code
            again, why = outcome(self._run_dir, code)
            if again != Retryable.exit_code:
                return self._ended(again, why)
            before, step = step, last_step(self._run_dir)
            pause_s = restarts.ended(made_progress=step > before)
            if pause_s is None:
                return self._ended(code, f"{restarts.failures} starts in a row have made no step")
            time.sleep(pause_s)  # a signal that has stopped another node may be on its way to here
            if self._is_stopped or (self._run_dir / LAUNCH_FOLDER / STOP_FILE).exists():
                return code
            print(f"argosy launch: the agent ended with {code} ({why}): it is started again", flush=True)

    def _run(self) -> int:
        """Return the agent's exit code, 128 + the signal's number if that has ended it."""
        self._process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL)
        if self._pending is not None:
            self._process.send_signal(self._pending)
        code = self._process.wait()
        return 128 - code if code < 0 else code

    def _pass_on(self, number: int, _: FrameType | None) -> None:
        self._is_stopped = True
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)
        else:
            self._pending = number

    @staticmethod
    def _ended(code: int, why: str) -> int:
        print(f"argosy launch: {why}: the agent is not started again", flush=True)
        return code


def main() -> None:
    """`python -m argosy.launch.agent_supervisor RUN_DIR COMMAND ...`, on each node."""
    sys.exit(AgentSupervisor(Path(sys.argv[1]), sys.argv[2:]).supervise())


if __name__ == "__main__":
    main()
