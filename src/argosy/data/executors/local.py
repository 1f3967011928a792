"""This machine: processes that end with the one that started them, however that one ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from argosy.data.executors.executor import WORKER, WorkersRequest, WorkerState
from argosy.errors import UserError
from argosy.processes.child import Child


class LocalExecutor:
    """Processes of this machine. What they print goes where their parent's errors go."""

    def __init__(self, request: WorkersRequest) -> None:
        asked = {"--time": request.time, "--account": request.account, "--partition": request.partition,
                 "--address": request.address, "--extra": request.extra}  # fmt: skip
        if given := [option for option, value in asked.items() if value]:
            raise UserError(f"--on local: {', '.join(given)} has no effect on this machine. Leave it out.")
        self._request, self._children = request, dict[str, Child]()

    def start(self, count: int) -> Sequence[str]:
        """Start processes. Raises: OSError if there can be no more."""
        program, environment = self._request.program, self._request.environment
        names = [f"local-{len(self._children) + number}" for number in range(count)]
        for name in names:
            self._children[name] = Child(program.module, *program.arguments, environment={**environment, WORKER: name})
        return names

    def states(self) -> Mapping[str, tuple[WorkerState, str]]:
        """Return which of them live."""
        return {
            name: ("running", f"process {child.pid}") if child.is_alive else ("ended", child.reap())
            for name, child in self._children.items()
        }

    def stop(self) -> None:
        """Kill them."""
        for child in self._children.values():
            child.kill()
