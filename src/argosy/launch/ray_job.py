"""Inside a job of Ray: hold the agents of a run until it has ended.

Each agent is a process that an actor owns, in a bundle of one placement group that has a node for each bundle. If a
node is lost, Ray places its bundle on another one that has room, now or later, and starts the actor there; meanwhile
the run goes on with a spare, or with fewer nodes. Whether agents that have all ended are started again follows from
what became of the run.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, BinaryIO

from argosy.engines.engine import STOP_SPARE_S, RunJob
from argosy.engines.ray import STOP_WAIT, WAITING_PREFIX
from argosy.engines.record import LaunchedJob
from argosy.errors import ArgosyError, Interrupted, Retryable, UserError, counted, signals_to
from argosy.files import made_folder
from argosy.launch.launching import check_other_job
from argosy.launch.requeue import decide, last_step
from argosy.plan.search.auto import processes_of
from argosy.processes.ray_cluster import THREADS, OwnedProcess, ProcessEvent, Share, connect, node_and_address, reserve

JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Environment variable that Ray sets for the command of a job, with its number among other things."""
JOB_NEWS_WAIT_S = 1.0
LOST_ACTOR_S = 1.0
"""Time for which an actor that does not answer is left alone."""
PACKAGES = "/working_dir_files/_ray_pkg_"
"""Part of the path of a folder that `ray job submit --working-dir` has copied to each node."""


class NodeAgent(OwnedProcess):
    """The actor of an agent, which takes its name and address from the node that it is on."""

    def __init__(self, words: Sequence[str], work_dir: str, is_alone: bool, has_address: bool):
        """is_alone: it is the run's only node, and needs neither. has_address: launch.address is given."""
        name, address = node_and_address()
        command = ["-m", "argosy", "train", *words]
        if not is_alone:
            command += ["--launch.node", name, *([] if has_address else ["--launch.address", address])]
        super().__init__(command, work_dir, {})


def job_here() -> str:
    """Return the number of the job of Ray whose command this process is; "" if it is none."""
    try:
        return str(json.loads(os.environ.get(JOB_CONFIG, ""))["metadata"]["job_submission_id"])
    except (ValueError, KeyError, TypeError):
        return ""


def hold(request: RunJob, job_id: str) -> int:
    """Hold the run's agents until it has ended. Return the job's exit code.

    Raises: UserError if the run cannot be started as asked, or another job has it; Interrupted after SIGTERM, once the
    agents have ended.
    """
    if PACKAGES in str(request.run_dir):
        raise UserError(
            f"{request.run_dir}: Ray copies this folder to each node, and a run's folder must be on a disk that all of "
            "them see. Give --run-dir, or submit without --working-dir, and `cd` to a folder that they all see."
        )
    path = request.folder / f"ray-{job_id}.out"
    with made_folder(request.folder), path.open("ab", buffering=0) as file:
        log = Log(file)
        try:
            dashboard = connect("--on ray")
            job = LaunchedJob.submitted("ray", job_id, request.nodes, path, {"address": f"http://{dashboard}"})
            check_other_job(request.run_dir, job)
            before = LaunchedJob.load(request.run_dir)
            if before is None or before.id != job_id:
                job.save(request.run_dir)
            if not os.environ.get(STOP_WAIT):
                log.say(f"`ray job stop` kills this job after 3 s; with {STOP_WAIT} in its runtime environment, later")
            return _supervise(request, log)
        except ArgosyError as error:
            file.write(f"argosy: {error}\n".encode())
            raise


class Log:
    """The output of the job, which goes to the run's folder as well."""

    def __init__(self, file: BinaryIO):
        self._file = file

    def say(self, text: str) -> None:
        self.put(f"argosy launch: {text}\n".encode())

    def put(self, text: bytes) -> None:
        self._file.write(text)
        sys.stdout.buffer.write(text)
        sys.stdout.flush()


class _Stop:
    """SIGTERM, which `argosy stop` and `ray job stop` send."""

    def __init__(self) -> None:
        self.since_s: float | None = None
        """The time of the first one; None: there was none."""

    def note(self, number: int, frame: FrameType | None) -> None:
        self.since_s = self.since_s or time.monotonic()

    def check(self) -> None:
        """Raises: Interrupted if it came."""
        if self.since_s is not None:
            raise Interrupted("stopped by SIGTERM. The same `argosy launch` goes on.", signal.SIGTERM)


def _supervise(request: RunJob, log: Log) -> int:
    """Reserve the nodes, and run the agents on them until the run has ended."""
    from ray.util.placement_group import remove_placement_group

    share = Share.of(request.nodes, request.cpus_per_node, request.gpus_per_node)
    patience_s, stop = request.run.resilience.coordinator_timeout_s, _Stop()
    with signals_to(stop.note, signal.SIGTERM):
        group = reserve(
            share, patience_s, lambda why: log.put(f"{WAITING_PREFIX}{why}\n".encode()), lambda: not stop.since_s
        )
        stop.check()
        log.say(f"an agent on each of {share}" if share.nodes > 1 else f"an agent on {share}")
        try:
            while True:
                code = _Agents(request, share, group, log, stop).until_ended()
                stop.check()
                code, why = decide(request.run_dir, code)
                again = code == Retryable.exit_code
                log.say(f"{why}: {'the agents are started again' if again else f'the job ends with {code}'}")
                if not again:
                    return code
        finally:
            remove_placement_group(group)


@dataclass(eq=False)
class _Agent:
    actor: Any
    node: str = ""
    exit_code: int | None = None
    is_lost: bool = False
    """Its actor does not answer: Ray looks for a place to start it again."""
    ask_at_s: float = 0.0


class _Agents:
    """The actors of all nodes, from their start to the end of all that are there."""

    def __init__(self, request: RunJob, share: Share, group: Any, log: Log, stop: _Stop):
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self._request, self._log, self._stop = request, log, stop
        words = (*request.words, "--run-dir", str(request.run_dir), *words_of_launch(request, share))
        kind = ray.remote(NodeAgent)
        self._agents = [
            _Agent(
                kind.options(
                    name=f"argosy {request.name} {number}", num_cpus=share.cpus, num_gpus=share.gpus,
                    max_restarts=-1, max_concurrency=THREADS,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number),
                ).remote(words, str(request.work_dir), share.nodes == 1, bool(request.run.launch.address))
            )
            for number in range(share.nodes)
        ]  # fmt: skip
        self._asked: dict[Any, _Agent] = {}
        self._began_at = last_step(request.run_dir)

    def until_ended(self) -> int:
        """Return the largest exit code of the agents, once all have ended that Ray has a place for."""
        import ray

        is_told = False
        try:
            while not self._is_over():
                if self._stop.since_s is not None and not is_told:
                    self._log.say("the run is to stop: its agents save")
                    for agent in self._agents:
                        agent.actor.stop.remote()
                    is_told = True
                self._ask()
                if not self._asked:
                    time.sleep(JOB_NEWS_WAIT_S)
                    continue
                for ref in ray.wait(list(self._asked), timeout=JOB_NEWS_WAIT_S)[0]:
                    self._hear(self._asked.pop(ref), ref)
        finally:
            for agent in self._agents:
                ray.kill(agent.actor)
        return max((agent.exit_code for agent in self._agents if agent.exit_code is not None), default=1)

    def _is_over(self) -> bool:
        none_is_left = all(agent.is_lost or agent.exit_code is not None for agent in self._agents)
        if self._stop.since_s is not None:
            return none_is_left or time.monotonic() - self._stop.since_s > self._request.grace_s + STOP_SPARE_S
        return none_is_left and any(agent.exit_code is not None for agent in self._agents)

    def _ask(self) -> None:
        now = time.monotonic()
        for agent in self._agents:
            if agent.exit_code is None and now >= agent.ask_at_s and agent not in self._asked.values():
                self._asked[agent.actor.news.remote()] = agent

    def _hear(self, agent: _Agent, ref: Any) -> None:
        import ray
        from ray.exceptions import ActorDiedError, ActorUnavailableError

        try:
            news: ProcessEvent = ray.get(ref)
        except ActorUnavailableError:
            if not agent.is_lost:
                self._log.say(f"{agent.node or 'a node'} is lost; Ray starts its agent again where there is room")
            agent.is_lost, agent.ask_at_s = True, time.monotonic() + LOST_ACTOR_S
            return
        except ActorDiedError as died:
            why = str(died).strip().splitlines()[-1].strip()
            self._log.say(f"an agent cannot be started: {why}")
            agent.exit_code = UserError.exit_code
            self._check_enough(why)
            return
        if agent.is_lost or not agent.node:
            self._log.say(f"an agent runs on {news.node}")
        agent.is_lost, agent.node = False, news.node
        self._log.put(news.output)
        if news.exit_code is not None:
            agent.exit_code = news.exit_code
            ended = f"the agent on {news.node} has ended with {news.exit_code}"
            self._log.say(ended)
            if news.exit_code == UserError.exit_code:
                self._check_enough(ended)

    def _check_enough(self, why: str) -> None:
        check_enough(self._request, [agent.exit_code for agent in self._agents], self._began_at, why)


def check_enough(request: RunJob, codes: Sequence[int | None], began_at: int, why: str) -> None:
    """Check that the agents that are left can make a first step: else they would wait for the others until the run's
    time for that is over, and once more after each new start.

    codes: their exit codes; None: it runs. began_at: the run's last step before the agents were started.
    Raises: UserError with `why`, which says what became of the last one.
    """
    needed = len(codes) if request.run.launch.nodes == 1 else request.run.launch.nodes
    left = sum(code != UserError.exit_code for code in codes)
    if left < needed and last_step(request.run_dir) == began_at:
        raise UserError(
            f"the run needs {counted(needed, 'node')}, and agents can run on {left}: {why}. What it printed says more. "
            f"All nodes must see {request.work_dir}, and have the same Argosy."
        )


def words_of_launch(request: RunJob, share: Share) -> list[str]:
    """Return the options of `argosy train` that follow from the nodes, where the run does not say them."""
    launch, words = request.run.launch, []
    if share.nodes > 1 and launch.nodes == 1:
        words += ["--launch.nodes", str(share.nodes)]
    if share.nodes > 1 and not (launch.coordinator or launch.lease):
        words += ["--launch.lease", "folder"]
    if request.cpus_per_node and not request.gpus_per_node and not launch.threads:
        planned = -(-processes_of(request.run.plan) // (share.nodes if launch.nodes == 1 else launch.nodes))
        words += ["--launch.threads", str(max(1, share.cpus // (launch.processes or planned or 1)))]
    return words
