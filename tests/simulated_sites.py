"""Sites whose exchanges are real, and whose network, clock and ranks are simulated: minutes pass in milliseconds."""

from __future__ import annotations

import json
import shutil
import zlib
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from argosy.config.schema import RunConfig
from argosy.observe.events import Events, read_lines
from argosy.processes.connection import BadMessage, WireRecord
from argosy.sync.exchange import SiteExchange
from argosy.sync.layout import AdoptedState, LeftChange, LeftState, Sites, at_site, read_record, write_record
from argosy.sync.ledger import RoundLedger, chain_of, dealt_in
from argosy.sync.links import PEER_SILENT_S
from argosy.sync.messages import FROM_SITE, FromSite, framed, unframed

TURN_S = 0.1
H, ROWS = 2, 2
MODEL = {"layers": 1, "width": 8, "heads": 1, "kv_heads": 1, "head_width": 8, "ffn_width": 8, "vocab_size": 40}


class AtOnce(Executor):
    """A pool that has done its work when it is asked to."""

    def submit(self, work: Callable[..., Any], /, *given: Any, **more: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(work(*given, **more))
        return done


class Wires:
    """What `Links` is to an exchange: messages between sites of a `Country`, as long as no link is cut."""

    def __init__(self, country: Country, me: str, its: SiteExchange):
        self._country, self._me, self._exchange = country, me, its
        self.sites: dict[str, None] = {}
        self.heard_s = {name: country.now_s for name in country.names if name != me}
        self.inbox: deque[tuple[str, bytes]] = deque()
        self.refusals: list[str] = []
        """What was refused, by whom it was said."""
        self._held: dict[str, list[tuple[Any, bytes]]] = {}
        """What was said to which connection while its link was cut: TCP sends it again if the link is mended soon."""

    def turn(self, _: float) -> list[tuple[str, FromSite, bytes]]:
        for name in self.heard_s:
            if self._country.is_joined(self._me, name):
                self.heard_s[name] = self._country.now_s
                if name not in self.sites:
                    self.sites[name] = None
                    self.tell(name, self._exchange.hello())
                self._send_again(name)
            elif name in self.sites and self._country.now_s - self.heard_s[name] > PEER_SILENT_S:
                del self.sites[name]
                self._held.pop(name, None)
        heard, self.inbox = self.inbox, deque()
        assert len(heard) < 300, "they flood each other"
        said: list[tuple[str, FromSite, bytes]] = []
        for name, frame in heard:
            if name in self.sites:
                try:
                    said.append((name, *unframed(frame, FROM_SITE)))
                except BadMessage as problem:
                    self.refuse(name, str(problem))
        return [one for one in said if not self._country.is_lost(*one)]

    def refuse(self, name: str, why: str) -> None:
        self.refusals.append(f"{name}: {why}")
        self.sites.pop(name, None)

    def tell(self, name: str, message: WireRecord, data: bytes = b"") -> None:
        if name not in self.sites:
            return
        frame = framed(message, data)
        if self._country.is_joined(self._me, name):
            self._send_again(name)
            self._country.sites[name].wires.inbox.append((self._me, frame))
        elif self._country.sites[name].is_up:
            self._held.setdefault(name, []).append((self._country.sites[name].wires, frame))

    def _send_again(self, name: str) -> None:
        for wires, frame in self._held.pop(name, []):
            if wires is self._country.sites[name].wires:
                wires.inbox.append((self._me, frame))

    def tell_all(self, message: WireRecord) -> None:
        for name in self.sites:
            self.tell(name, message)

    def close(self) -> None: ...


class Site:
    """One site: its exchange, and ranks that do what `training.rounds` does, with a vector for a model."""

    def __init__(self, country: Country, name: str, run: RunConfig):
        self.country, self.name, self.run_dir = country, name, country.folder / name
        self.sites = Sites.of(at_site(run.model_copy(update={"site": name})), self.run_dir)
        self.round_s = country.round_s
        self.is_up = False
        self.left_from: dict[int, str] = {}
        """Round -> the chain of the ledger that led to the weights which the change left for it began with."""
        self.wires: Any = SimpleNamespace(inbox=deque())
        self.start()

    def start(self) -> None:
        """Begin, or go on from the folder: the ranks have a checkpoint of some rounds ago."""
        self.is_up, self.run_dir_ledger = True, RoundLedger(self.run_dir)
        self.exchange = SiteExchange(
            self.sites, RoundLedger(self.run_dir), Events(self.run_dir, "exchange"), self._links, AtOnce()
        )
        self.rounds, self.weights = 0, np.zeros(self.sites.flat(0).elements, np.float32)
        checkpoint = self.run_dir / "checkpoint.json"
        if checkpoint.exists():
            self.rounds = int(json.loads(checkpoint.read_text()))
            self.weights = np.load(self.run_dir / "checkpoint.npy")
        self._say_reached()
        self._began_s = self.country.now_s

    def kill(self) -> None:
        """End all of its processes."""
        self.is_up = False
        self.exchange.close()

    def lose_folder(self) -> None:
        """Begin anew with nothing."""
        self.kill()
        shutil.rmtree(self.run_dir)
        self.start()

    def _links(self, its: SiteExchange) -> Any:
        self.wires = Wires(self.country, self.name, its)
        return self.wires

    @property
    def ledger(self) -> RoundLedger:
        return RoundLedger(self.run_dir)

    @property
    def is_done(self) -> bool:
        return self.rounds >= self.sites.rounds

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [e for e in read_lines(self.run_dir / "events/exchange.jsonl") if e["event"] == kind]

    # ---- ranks --------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Do what the ranks do in a turn."""
        known, sites = self.run_dir_ledger, self.sites
        known.refresh()
        if known.damage:
            sites.damaged.touch()
            return
        if self._adopt() or self.is_done:
            return
        if len(known.lines) > self.rounds:
            if not sites.average(self.rounds).exists():
                sites.lost.touch()
                return
            mean = sites.wire.decode(np.fromfile(sites.average(self.rounds), np.uint8))[: len(self.weights)]
            self.weights = self.weights - mean
            self.rounds += 1
            self._began_s = self.country.now_s
            self._say_reached()
            if self.rounds % 3 == 0:
                self._save()
        elif self.name in dealt_in(sites.shares, known.lines, self.rounds) and not sites.about(self.rounds).exists():
            if self.country.now_s - self._began_s < self.round_s:
                return
            seed = [self.rounds, sites.names.index(self.name)]
            np.random.default_rng(seed).normal(0, 1, len(self.weights)).astype(np.float32).tofile(
                sites.change(self.rounds)
            )
            checkpoint = self.run_dir / "checkpoint.json"
            needs = int(json.loads(checkpoint.read_text())) if checkpoint.exists() else 0
            about = LeftChange(tokens=sites.shares.batch(self.name) * H, skipped=[], needs_round=needs)
            write_record(sites.about(self.rounds), about)
            self.left_from[self.rounds] = chain_of(known.lines[: self.rounds])
        if self.rounds and sites.want_state.exists():
            self.weights.tofile(sites.state(self.rounds - 1))
            data = sites.state(self.rounds - 1).read_bytes()
            write_record(sites.state_about(self.rounds - 1), LeftState(bytes=len(data), sum=zlib.crc32(data)))
            sites.want_state.unlink()

    def _adopt(self) -> bool:
        if not self.sites.adoption.exists():
            return False
        about = read_record(self.sites.adoption, AdoptedState)
        assert self.run_dir_ledger.lines[about.rounds - 1].chain == about.chain
        self.rounds, self.weights = about.rounds, np.fromfile(self.sites.adopted, np.float32)
        self._say_reached()
        self._save()
        for left in self.sites.folder.glob("change-*.json"):
            left.unlink()
        self.sites.adoption.unlink()
        return True

    def _say_reached(self) -> None:
        self.sites.reached.write_text(str(self.rounds))

    def _save(self) -> None:
        np.save(self.run_dir / "checkpoint.npy", self.weights)
        (self.run_dir / "checkpoint.json").write_text(str(self.rounds))


class Country:
    """Sites and the links between them, in simulated time."""

    def __init__(self, folder: Path, names: str = "ABC", rounds: int = 30, round_s: float = 2.0, **sync: Any):
        self.folder, self.names, self.round_s = folder, names, round_s
        self.now_s = 1000.0
        self.cut: set[frozenset[str]] = set()
        """Pairs of sites that do not hear each other."""
        self.is_lost: Callable[[str, FromSite, bytes], bool] = lambda sender, message, data: False
        """Messages that get lost, by who sends them."""
        self.sites: dict[str, Site] = {}
        keys = {"every_steps": H, "patience_s": 20.0, **sync}
        self.run = RunConfig.model_validate({
            "model": MODEL, "data": {"sources": {"text": 1.0}, "seq_len": 8},
            "train": {"steps": rounds * H, "global_batch": ROWS * len(names)},
            "sites": [{"name": name} for name in names], "sync": keys,
        })  # fmt: skip

    def start(self, names: str = "") -> None:
        for name in names or self.names:
            self.sites[name] = Site(self, name, self.run)

    def is_joined(self, one: str, other: str) -> bool:
        """True if these sites hear each other."""
        both = [self.sites[name].is_up for name in (one, other) if name in self.sites]
        return both == [True, True] and frozenset((one, other)) not in self.cut

    def isolate(self, name: str) -> None:
        """Cut all links of a site."""
        self.cut |= {frozenset((name, other)) for other in self.names if other != name}

    def pass_time(self, seconds: float) -> None:
        """Let so much time go by."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.turn()

    def turn(self) -> None:
        self.now_s += TURN_S
        for site in self.sites.values():
            if site.is_up:
                site.step()
                site.exchange.turn(0)

    def until(self, is_so: Callable[[], bool], within_s: float = 200.0) -> float:
        """Let time go by until something is so; return how much that was."""
        began_s = self.now_s
        while not is_so():
            assert self.now_s < began_s + within_s, f"not within {within_s} s: {self.story()}"
            self.turn()
        return self.now_s - began_s

    def finish(self) -> None:
        """Let all sites that are up come to the end, and check that they come to the same."""
        here = [site for site in self.sites.values() if site.is_up]
        self.until(lambda: all(site.is_done for site in here), 60 + 3 * here[0].sites.rounds * self.round_s)
        chains = {tuple(line.chain for line in site.ledger.lines) for site in here}
        assert len(chains) == 1, self.story()
        assert all(np.array_equal(site.weights, here[0].weights) for site in here)

    def story(self) -> str:
        """What each site has, for messages."""
        return json.dumps({
            name: {"up": site.is_up, "ranks": site.rounds, "ledger": len(site.ledger.lines),
                   "status": json.loads(site.sites.status.read_text())}
            for name, site in self.sites.items()
        })  # fmt: skip
