"""The first server: it deals samples out, orders updates, and keeps all servers at the same version."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from argosy.accelerator import peak_memory_bytes
from argosy.checkpoint import store
from argosy.checkpoint.load import problem_of
from argosy.config.schema import RunConfig
from argosy.errors import RunFailed
from argosy.observe.events import Events, Metrics
from argosy.observe.screen import Progress
from argosy.processes.connection import WireRecord
from argosy.sync import messages as say
from argosy.sync.deal import AppliedUpdate, DealtItems, rate_of
from argosy.sync.layout import ServerLayout
from argosy.sync.ledger import UpdateLedger
from argosy.training.evaluation import Score
from argosy.training.schedule import learning_rate
from argosy.training.server.shard import RequestRefused, ServerShard

LOST_S = 10.0
"""A worker that was not heard for so long is lost: what it was dealt is dealt to another."""
SERVERS_ASK_S = 1.0
"""Seconds between two questions to the other servers, and two answers to workers that wait."""
MOST_BAD_GRADIENTS = 10
"""The run fails after so many gradients in a row that are not finite."""
Tell = Callable[[str, WireRecord], None]
Answer = Callable[[WireRecord], None]


class Leader:
    """Decides for all servers."""

    def __init__(
        self,
        layout: ServerLayout,
        run_dir: Path,
        shard: ServerShard,
        events: Events,
        progress: Progress,
        tell: Tell,
        heard_s: Mapping[str, float],
    ):
        """tell(name, message): sends to another server. heard_s: when each worker was heard last."""
        self._layout, self._run_dir, self._shard, self._tell, self._heard_s = layout, run_dir, shard, tell, heard_s
        self._servers = list(layout.addresses)
        self._events, self._progress = events, progress
        self._run: RunConfig = layout.run
        self._ledger, self._metrics = UpdateLedger(run_dir), Metrics(run_dir)
        self._dealing = DealtItems(layout.updates, self._run.sync.max_staleness)
        self._ready: set[str] = set()
        self._looked_s = 0.0
        self._waiting: dict[str, tuple[say.AskForWork, Answer]] = {}
        self._sessions: dict[str, str] = {}
        self._to_come = {site.name for site in self._run.sites}
        self._held_since_s = 0.0
        self._next_score = 0
        self._scoring: str | None = None
        self._is_scored = False
        self._bad_in_a_row = 0
        self._saved_s = self._updated_s = time.monotonic()
        self.failure: str = ""
        """Why the run has failed; empty if it has not."""
        self.begin("")

    @property
    def is_done(self) -> bool:
        """True once all updates are made, the last weights are scored, and all workers know that."""
        return self._dealing.is_over and self._is_scored and not self._sessions

    @property
    def is_expecting(self) -> bool:
        """True while a worker has not been here."""
        return bool(self._to_come)

    @property
    def is_over(self) -> bool:
        """True once all updates are made."""
        return self._dealing.is_over

    @property
    def version(self) -> int:
        """Updates made so far."""
        return self._dealing.version

    @property
    def step(self) -> int:
        """Steps that these updates were made from."""
        return self._layout.step_of(self.version)

    def sync(self) -> None:
        """Wait until the ledger is on the disk: without its lines the checkpoint that follows leads nowhere."""
        self._ledger.sync()

    # ---- servers ------------------------------------------------------------------------------------------------

    def begin(self, why: str) -> None:
        """Have all servers go to the newest checkpoint. Raises: StorageError, UserError, DamagedCheckpoint."""
        choice = store.newest_whole(self._run_dir, check=problem_of)
        step = choice.checkpoint.step if choice else 0
        version = self._layout.version_of(step)
        for words in choice.damaged if choice else ():
            self._events.write("damaged_checkpoint", problem=words)
        for newer in store.committed(self._run_dir):
            if newer.step > step:
                store.withdraw(newer)
        store.sweep(self._run_dir, 0)
        generation = uuid.uuid4().hex
        try:
            lost = self._ledger.turn_back(version)
        except ValueError as problem:
            raise RunFailed(f"{problem}. Restore it from a copy, or start anew with another --run-dir.") from None
        self._metrics.forget_from(step)
        config = self._run.sync
        skipped = [item for item, _ in self._ledger.skipped]
        self._dealing = DealtItems.after(
            self._ledger.updates, skipped, self._layout.updates, config.max_staleness, generation
        )
        self._shard.begin(generation, version)
        self._ready = {self._servers[0]}
        self._next_score = self._score_after(version)
        self._scoring, self._is_scored = None, False
        self._looked_s = 0.0
        again = {"lost": lost, "steps_lost": self._layout.step_of(lost)}
        self._events.write("servers_begin", step=step, servers=self._layout.servers, why=why, **again)
        if why:
            self._progress.say(f" all servers go back to step {step}: {why}", "yellow")
        for name in self._servers[1:]:
            self._tell(name, say.GoToVersion(generation=generation, version=version))

    def hear_server(self, name: str, message: say.ServerStatus) -> None:
        """Hear where another server is."""
        if message.generation != self._dealing.generation:
            if name in self._ready:
                self.begin(f"{name} was started again")
            else:
                self._tell(name, say.GoToVersion(generation=self._dealing.generation, version=self._dealing.version))
        elif message.problem:
            self.begin(f"{name}: {message.problem}")
        else:
            self._ready.add(name)

    def tick(self) -> None:
        """Look after servers and workers; call it often."""
        now = time.monotonic()
        self._take_back(now)
        self._deal_out(now)
        if now - self._looked_s < SERVERS_ASK_S:
            return
        self._looked_s = now
        for name in self._servers[1:]:
            self._tell(name, say.CheckServer(generation=self._dealing.generation, version=self._dealing.version))
        missing = [name for name in self._servers if name not in self._ready]
        for work, answer in self._waiting.values():
            answer(say.WaitForWork(ask=work.ask, by=missing or self._dealing.holds_up))

    # ---- workers ------------------------------------------------------------------------------------------------

    def arrived(self, site: str, session: str) -> None:
        """Note that a worker is here; if it was started again, what it was dealt before is given back."""
        before = self._sessions.get(site)
        if before == session:
            return
        self._sessions[site] = session
        self._to_come.discard(site)
        self._give_back(site, "it was started again" if before is not None else "")
        if before is None:
            self._events.write("worker_came", site=site, step=self.step)
            self._progress.say(f" {site} is here", "green")

    def left(self, site: str, session: str, why: str = "it ended") -> None:
        """Note that a worker ends."""
        if self._sessions.get(site) == session:
            del self._sessions[site]
            self._waiting.pop(site, None)
            self._give_back(site, why)
            self._events.write("worker_left", site=site, step=self.step, why=why)
            self._progress.say(f" {site} has left: {why}")

    def asked(self, site: str, work: say.AskForWork, answer: Answer) -> None:
        """A worker asks for samples: it gets them once it may."""
        self._give_back(site, "")
        self._waiting[site] = (work, answer)
        self._deal_out(time.monotonic())

    def commit(self, site: str, message: say.Commit) -> say.Committed:
        """Make the update of a worker's gradient, which all servers have."""
        steps = self._layout.local_steps
        if len(message.losses) != steps or len(message.norms) != steps:
            raise RequestRefused(
                f"it tells the losses of {len(message.losses)} steps, and an update here is of {steps}"
            )
        update = self._known(site, message.lease)
        if update is None:
            if len(self._ready) < self._layout.servers or not self._shard.has(site, message.lease):
                return say.Committed(ask=message.ask, update=None)
            update = self._dealing.commit(site, message.lease)
            if update is None:
                return say.Committed(ask=message.ask, update=None)
            self._make(update, message)
        return say.Committed(ask=message.ask, update=update.update, staleness=update.staleness, rate=self._rate(update))

    def bad(self, site: str, message: say.BadGradient) -> say.Committed:
        """Make no update from a worker's samples."""
        item = self._dealing.skip(site, message.lease)
        if item is not None:
            self._bad_in_a_row += 1
            self._ledger.skip(item, site, message.why)
            samples = self._layout.samples(item)
            self._events.write("samples_skipped", step=self.step, site=site, samples=samples, why=message.why)
            self._progress.say(f" no update from samples {list(samples[0])}, which {site} had: {message.why}", "yellow")
            if self._bad_in_a_row >= MOST_BAD_GRADIENTS:
                self.failure = f"the last {MOST_BAD_GRADIENTS} gradients were not finite, and changed nothing"
            elif self._run.resilience.on_bad_step == "stop":
                self.failure = f"{message.why}, and resilience.on_bad_step = stop"
        return say.Committed(ask=message.ask, update=None)

    def scored(self, site: str, message: say.Scored) -> None:
        """Write down how good weights are."""
        if self._scoring != site or message.version > self.version:
            return
        self._scoring = None
        step = self._layout.step_of(message.version) - 1
        self._is_scored = message.version >= self._layout.updates
        if message.loss is None or message.bits_per_byte is None:
            return
        score = Score(message.loss, None, message.bits_per_byte, 0)
        self._metrics.write_evaluation(step, score.line())
        self._progress.evaluated(step, score.in_words())

    # ---- updates ------------------------------------------------------------------------------------------------

    def _known(self, site: str, lease: str) -> AppliedUpdate | None:
        found = self._dealing.committed.get(lease)
        return found if found is not None and found.site == site else None

    def _learning_rate(self, step: int) -> float:
        return learning_rate(self._run, step, self._run.train.steps)

    def _rate(self, update: AppliedUpdate) -> float:
        """Return the rate at which the servers apply an update: of the optimizer, or of outer steps."""
        config = self._run.sync
        if config.local_steps > 1:
            return config.outer_lr * rate_of(update.staleness + 1, config.staleness_rate)
        return self._learning_rate(update.update) * rate_of(update.staleness, config.staleness_rate)

    def _make(self, update: AppliedUpdate, message: say.Commit) -> None:
        """Apply an update everywhere, and write it down."""
        rate, number = self._rate(update), update.update
        saves = self._is_save_due(number + 1)
        self._bad_in_a_row = 0
        self._ledger.add(update, self._layout.samples(update.item), loss=sum(message.losses) / len(message.losses))
        if saves:
            self.sync()
        order = say.Apply(
            generation=self._dealing.generation, update=number, lease=message.lease, rate=rate, save=saves
        )
        for name in self._servers[1:]:
            self._tell(name, order)
        try:
            self._shard.apply(order.generation, number, message.lease, rate)
        except RequestRefused as problem:  # its pieces were looked at a moment ago
            raise RunFailed(str(problem)) from None
        self._write_lines(update, message, rate)
        if saves:
            self._saved_s = time.monotonic()
            self._shard.save()

    def _is_save_due(self, version: int) -> bool:
        settings, step, before = self._run.checkpoint, self._layout.step_of(version), self._layout.step_of(version - 1)
        by_time = settings.every_minutes and time.monotonic() - self._saved_s >= 60 * settings.every_minutes
        by_steps = settings.every_steps and step // settings.every_steps > before // settings.every_steps
        return bool(by_time or by_steps or version == self._layout.updates)

    def _write_lines(self, update: AppliedUpdate, message: say.Commit, rate: float) -> None:
        """Write a line for each step of an update, which take its time in equal parts."""
        run, layout, now = self._run, self._layout, time.monotonic()
        step_s, self._updated_s = (now - self._updated_s) / layout.local_steps, now
        first = layout.step_of(update.update)
        of_update = {"site": update.site, "staleness_steps": update.staleness, "participants": sorted(self._sessions)}
        for number, (loss, norm) in enumerate(zip(message.losses, message.norms, strict=True)):
            is_local, is_last = layout.local_steps > 1, number == layout.local_steps - 1
            record: dict[str, Any] = {
                "step": first + number,
                "time_s": round(time.time(), 3),
                "tokens": (first + number + 1) * run.tokens_per_step,
                "loss": loss,
                "grad_norm": norm,
                "lr": self._learning_rate(layout.step_of(update.version) + number) if is_local else rate,
                "sample_ranges": [list(layout.samples_of_step(update.item, number))],
                "step_time_s": round(step_s, 6),
                "tokens_per_s": round(run.tokens_per_step / step_s, 1) if step_s else 0.0,
                "memory_bytes": peak_memory_bytes(torch.device("cpu")),
                "seconds": {"step": round(step_s, 6)},
            }
            if is_last:
                outer = {"steps": layout.local_steps, "rate": rate} if is_local else {}
                record |= {"sync": {"staleness": update.staleness}, "sites": of_update | outer}
            self._metrics.write(record)
        if update.update % 10 == 9 or update.update == 0:
            self._progress.say(
                f" step {layout.step_of(update.update + 1):>5}/{run.train.steps}  loss {message.losses[-1]:.3f}  by "
                f"{update.site}, staleness {update.staleness}"
            )

    # ---- dealing out --------------------------------------------------------------------------------------------

    def _deal_out(self, now: float) -> None:
        """Deal to workers that wait, if all servers are ready."""
        if len(self._ready) < self._layout.servers:
            return
        for site, (work, answer) in list(self._waiting.items()):
            dealing = self._dealing
            if self._scoring is None and not self._is_scored and dealing.version >= self._next_score:
                del self._waiting[site]
                self._scoring = site
                self._next_score = self._score_after(dealing.version)
                answer(say.ScoreRequest(ask=work.ask, generation=dealing.generation, version=dealing.version))
                continue
            if dealing.is_over:
                del self._waiting[site]
                answer(say.RunIsOver(ask=work.ask, generation=dealing.generation, version=dealing.version))
                continue
            lease = dealing.deal(site)
            if lease is None:
                self._held_since_s = self._held_since_s or now
                return
            del self._waiting[site]
            self._held_since_s = 0.0
            answer(
                say.DealtWork(
                    ask=work.ask,
                    lease=lease.name,
                    item=lease.item,
                    generation=dealing.generation,
                    version=lease.version,
                )
            )

    def _score_after(self, version: int) -> int:
        """Return the version that is the next to be scored."""
        every, steps = self._run.evaluate.every_steps or self._run.train.steps, self._layout.local_steps
        due = (self._layout.step_of(version) // every + 1) * every
        return min(-(-due // steps), self._layout.updates)

    def _take_back(self, now: float) -> None:
        """Take back what lost workers were dealt, and what those have that others have waited for long enough."""
        for site, session in list(self._sessions.items()):
            if now - self._heard_s[site] > LOST_S:
                self.left(site, session, f"it sent nothing for {LOST_S:.0f} s")
        if not self._waiting or self._dealing.may_deal or self._dealing.is_over:
            self._held_since_s = 0.0
            return
        self._held_since_s = self._held_since_s or now
        if now - self._held_since_s > self._run.sync.patience_s:
            self._held_since_s = 0.0
            for site in self._dealing.holds_up:
                self._give_back(site, f"others waited for it for {self._run.sync.patience_s:g} s")

    def _give_back(self, site: str, why: str) -> None:
        lease = self._dealing.give_back(site)
        if self._scoring == site:
            self._scoring = None
            self._next_score = min(self._next_score, self._dealing.version)
        if lease is not None and why:
            samples = self._layout.samples(lease.item)
            self._events.write("samples_returned", step=self.step, site=site, samples=samples, why=why)
