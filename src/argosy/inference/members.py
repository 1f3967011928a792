"""A model that is laid out over processes: those of this machine that are started for it, or those of a launcher.

Members that are started get each request. They compute it together, and those that have a part of the result send it:
the first member the tokens of a step, each data-parallel rank the logits of its rows.
"""

from __future__ import annotations

import math
import os
import queue
import signal
import threading
import warnings
from collections import deque
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from argosy.accelerator import count_here, type_here
from argosy.config.launch import LaunchConfig
from argosy.errors import ArgosyWarning, UserError, counted
from argosy.inference.rank_model import EvaluateRequest, RankModel, SampleRequest
from argosy.inference.tasks import TaskRequest
from argosy.inference.trained_model import SomeModel, default_device, open_model
from argosy.launch.local_world import LocalWorld, failure_told
from argosy.parallel.encoding import decode, encode, from_text, to_text
from argosy.parallel.world import World, join_world, leave_world
from argosy.plan.hardware.local_machine import cores_here
from argosy.plan.plan import Plan
from argosy.processes.child import Channel, ChannelClosed, ForkEntry, Message, channel_to_parent

MODEL_MEMBER = ForkEntry("argosy.inference.members")
"""A process that holds a part of a model."""
PROCESSES_A_CORE = 4
"""No more processes are started on a machine without other devices: they would wait for each other for ever."""


@dataclass(frozen=True)
class LoadRequest:
    """The model that members are to load; with `scored`, to score it and do no more."""

    place: str
    plan: Plan
    timeout_s: float
    scored: EvaluateRequest | TaskRequest | None = None


def check_devices(plan: Plan) -> None:
    """Raise UserError if this machine has too few devices for `plan`; warn if processes share cores."""
    size, devices, cores = plan.world_size, count_here(), cores_here()
    if devices and size > devices:
        raise UserError(
            f'plan = "{plan}" is for {size} devices, and this machine has {devices} ({type_here()}). Name a plan for '
            f"{devices} or fewer."
        )
    if not devices and size > PROCESSES_A_CORE * cores:
        raise UserError(
            f'plan = "{plan}" is for {size} devices, and this machine has {cores} cores and no GPU. Name a plan for '
            f"{cores} or fewer."
        )
    if not devices and size > cores:
        text = f'plan = "{plan}": {size} processes on {cores} cores will wait for each other.'
        warnings.warn(text, ArgosyWarning, stacklevel=2)


@contextmanager
def launched_world(plan: Plan) -> Iterator[World | None]:
    """Yield the world of processes that a launcher (torchrun, say) has started this command in; None without one.

    Raises: UserError if it has started more or fewer than `plan` is for.
    """
    if "RANK" not in os.environ:
        yield None
        return
    size = int(os.environ["WORLD_SIZE"])
    if size != plan.world_size:
        raise UserError(
            f'plan = "{plan}" is for {counted(plan.world_size, "process", "es")}, and the launcher has started '
            f"{size} (WORLD_SIZE). Start as many as the plan is for, or unset RANK to have them started."
        )
    world = join_world(LaunchConfig())
    try:
        yield world
    finally:
        leave_world()


def open_together(place: str | Path, trust_code: bool, world: World | None) -> SomeModel:
    """Open a model (`open_model`) in each process of `world`, of which the first alone reads a checkpoint back."""
    if world is None:
        return open_model(place, trust_code)
    found = world.share_first(lambda: open_model(place, trust_code).place, str)
    return open_model(found, trust_code, check=lambda checkpoint: None)


class InProcesses:
    """A backend (`loaded_model.Backend`): members hold the model's parts."""

    def __init__(self, source: SomeModel, plan: Plan, vocab_size: int):
        """Start the members, and wait until all have loaded their parts. Raises: what one of them ends with."""
        check_devices(plan)
        self._vocab_size, self._number = vocab_size, 0
        #: Messages about texts under way that came while another request was waited for, by number.
        self._set_aside: dict[int, deque[Message]] = {}
        self._world = LocalWorld(MODEL_MEMBER, plan.world_size, "the model")
        try:
            self._world.send("load", data=[encode(_request(source, plan), LoadRequest)])
            for _ in range(plan.world_size):
                self._world.receive()
        except BaseException:
            self.close()
            raise

    def logits(self, tokens_BT: Tensor) -> Tensor:
        number = self._next_number()
        rows, length = tokens_BT.shape
        self._world.send("logits", number=number, rows=rows, data=[tokens_BT.contiguous().numpy().tobytes()])
        found, missing = torch.empty(rows, length, self._vocab_size), rows
        while missing:
            message = self._receive(number)
            part = torch.frombuffer(message["data"][0], dtype=torch.float32).view(-1, length, self._vocab_size)
            found[message["first"] : message["first"] + len(part)] = part
            missing -= len(part)
        return found

    def sample(self, request: SampleRequest) -> Generator[list[int | None]]:
        number = self._next_number()
        self._set_aside[number] = deque()
        self._world.send("sample", number=number, data=[encode(request, SampleRequest)])
        try:
            while (message := self._receive(number))["kind"] == "tokens":
                yield message["tokens"]
        finally:
            del self._set_aside[number]
            self._world.send("stop", number=number)

    def close(self) -> None:
        self._world.close()

    def _next_number(self) -> int:
        self._number += 1
        return self._number

    def _receive(self, number: int) -> Message:
        """Return the next message about a request; what is still told of those before, which were stopped, is dropped.

        Raises: as `LocalWorld.receive`.
        """
        kept = self._set_aside.get(number)
        while not kept:
            _, message = self._world.receive()
            if message.get("number") == number:
                return message
            if message.get("number") in self._set_aside:
                self._set_aside[message["number"]].append(message)
        return kept.popleft()


def scores_of(source: SomeModel, plan: Plan, world: World | None, request: EvaluateRequest | TaskRequest) -> Any:
    """Return the scores that are asked for (a `Score`, or `TaskScores`), computed under `plan`.

    world: the processes of a launcher, which all call this; None: this process, or as many as the plan is for, which
    are started for it. Raises: UserError, RunFailed.
    """
    if world is not None or plan.world_size == 1:
        return request.score(source, plan, world or World(device=default_device()))
    check_devices(plan)
    with closing(LocalWorld(MODEL_MEMBER, plan.world_size, "the evaluation")) as members:
        members.send("load", data=[encode(_request(source, plan, request), LoadRequest)])
        return from_text(members.receive()[1]["score"], request.kind)


def _request(source: SomeModel, plan: Plan, scored: EvaluateRequest | TaskRequest | None = None) -> LoadRequest:
    return LoadRequest(source.place, plan, source.run.launch.timeout_s, scored)


# ---- in a member -----------------------------------------------------------------------------------------------


class Inbox:
    """The messages of the client, read by a thread, which ends this process once the client is gone."""

    def __init__(self, client: Channel):
        self._client = client
        self._waiting = queue.SimpleQueue[Message]()
        self._stopped = set[int]()
        threading.Thread(target=self._listen, name="argosy-client", daemon=True).start()

    def next(self) -> Message:
        """Return the next request, however long it takes to come. Of those before, nobody asks any more."""
        message = self._waiting.get()
        self._stopped -= {number for number in self._stopped.copy() if number < message.get("number", 0)}
        return message

    def is_stopped(self, number: int) -> bool:
        """True once the client has no more use for the request of this number."""
        return number in self._stopped

    def _listen(self) -> None:
        try:
            while True:
                message = self._client.receive()
                if message["kind"] == "stop":
                    self._stopped.add(message["number"])
                else:
                    self._waiting.put(message)
        except ChannelClosed:
            os._exit(1)


def main() -> None:
    """Run in each member: load a part of the model, and answer requests until the client is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the process that asked decides
    client = channel_to_parent(math.inf)
    inbox = Inbox(client)
    with failure_told(client):
        request: LoadRequest = decode(inbox.next()["data"][0], LoadRequest, "the client")
        world = join_world(LaunchConfig(timeout_s=request.timeout_s))
        source = open_model(request.place, check=lambda checkpoint: None)  # the client has read it back
        if request.scored is not None:
            scores = request.scored.score(source, request.plan, world)
            if world.is_first:
                client.send("scored", score=to_text(scores, request.scored.kind))
            inbox.next()  # there is nothing more: the client ends this process
        model = RankModel(source, request.plan, world)
        client.send("loaded")
        while True:
            _answer(inbox, client, model, world)


def _answer(inbox: Inbox, client: Channel, model: RankModel, world: World) -> None:
    """Compute the next request with the other members."""
    message = inbox.next()
    number = message["number"]
    if message["kind"] == "logits":
        tokens = torch.frombuffer(bytearray(message["data"][0]), dtype=torch.int64).view(message["rows"], -1)
        found = model.logits(tokens)
        if found is not None and len(found):
            first = model.rows_of(model.dp_rank, len(tokens)).start
            client.send("logits", number=number, first=first, data=[found.cpu().contiguous().numpy().data.cast("B")])
        return
    request: SampleRequest = decode(message["data"][0], SampleRequest, "the client")
    for told in model.sample(request, lambda: inbox.is_stopped(number)):
        if world.is_first:
            client.send("tokens", number=number, tokens=told)
    if world.is_first:
        client.send("sampled", number=number)
