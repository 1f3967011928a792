"""Ray: an actor for each worker, which owns its process. Actors begin one by one, as the cluster has room for them."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from argosy.data.executors.executor import WORKER, WorkersRequest, WorkerState
from argosy.errors import UserError
from argosy.processes.ray_cluster import connect
from argosy.processes.ray_process import THREADS, OwnedProcess


@dataclass
class _Worker:
    actor: Any
    asked: Any
    """The answer that is waited for: first where it runs, then its news."""
    state: WorkerState = "waiting"
    words: str = "for room in the cluster"


class RayExecutor:
    """Actors of the cluster at an address, else of that which RAY_ADDRESS names, or that this machine is in.

    They end with this process.
    """

    def __init__(self, request: WorkersRequest) -> None:
        asked = {"--time": request.time, "--account": request.account, "--partition": request.partition,
                 "--extra": request.extra}  # fmt: skip
        if given := [option for option, value in asked.items() if value]:
            raise UserError(f"--on ray: {', '.join(given)} has no effect there. Leave it out.")
        connect(request.address, "--on ray")
        self._request, self._workers = request, dict[str, _Worker]()
        self._mark = secrets.token_hex(3)
        """Tells these workers from those of a caller before, which may be about to end."""

    def start(self, count: int) -> Sequence[str]:
        """Make actors, which Ray starts again if their node is lost."""
        import ray

        request, kind = self._request, ray.remote(OwnedProcess)
        names = [f"ray-{self._mark}-{len(self._workers) + number}" for number in range(count)]
        for name in names:
            actor = kind.options(num_cpus=request.cpus, max_restarts=-1, max_concurrency=THREADS).remote(
                request.program.words[1:],
                str(request.work_dir),
                {**request.environment, WORKER: name},
                str(request.folder / f"{name}.out"),
            )
            self._workers[name] = _Worker(actor, actor.place.remote())
        return names

    def states(self) -> Mapping[str, tuple[WorkerState, str]]:
        """Return what the actors have answered since the last call."""
        import ray

        asked = {worker.asked: worker for worker in self._workers.values() if worker.state != "ended"}
        if asked:
            for answer in ray.wait(list(asked), num_returns=len(asked), timeout=0)[0]:
                _hear(asked[answer])
        return {name: (worker.state, worker.words) for name, worker in self._workers.items()}

    def stop(self) -> None:
        """Kill the actors, and their processes with them."""
        import ray

        for worker in self._workers.values():
            ray.kill(worker.actor)


def _hear(worker: _Worker) -> None:
    import ray
    from ray.exceptions import ActorDiedError, ActorUnavailableError

    try:
        answer = ray.get(worker.asked)
    except ActorUnavailableError:
        worker.state, worker.words = "waiting", "its node is lost; Ray starts it again where there is room"
        worker.asked = worker.actor.place.remote()
        return
    except ActorDiedError as died:
        worker.state, worker.words = "ended", str(died).strip().splitlines()[-1].strip()
        return
    if isinstance(answer, str):
        worker.state, worker.words = "running", answer
    elif answer.exit_code is not None:
        worker.state, worker.words = "ended", f"exit code {answer.exit_code}"
        return
    worker.asked = worker.actor.news.remote()
