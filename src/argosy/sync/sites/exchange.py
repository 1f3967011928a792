"""The exchange: the one process of a site that speaks to the other sites. Its ranks and it speak through files.

A round: each site's ranks leave what they changed (`Sites.change`); the exchanges tell each other that they are ready;
the leader says who takes part; they sum (`assembly`); when the leader has all of the average it writes the round's line
to its ledger and sends it to the others. A site's ranks go on once the line is in their own ledger. What is not in a
ledger has no effect, so any process may die at any moment.

Each second every exchange says where it stands (`Standing`). From that follows all else:
- The leader is the first site of the run file that is not behind and was heard within sync.patience_s.
- A site that is behind asks another for the line of the round at hand, then for its average, one round after another.
- Members of the next round are the sites that took part in this one, and those whose ranks have nearly caught up
  (`others.BEHIND`). Nobody waits for a site that is further away.
- Of sites that have gone apart, one gives way (`standing`) and takes the other's state (`adoption`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from argosy.faults import fault
from argosy.files import atomic_write, make_folder
from argosy.observe.events import Events
from argosy.sync.sites.adoption import Adoption
from argosy.sync.sites.assembly import Assembly, Proposal
from argosy.sync.sites.average import distances, encode_file
from argosy.sync.sites.kept import Kept
from argosy.sync.sites.layout import Sites
from argosy.sync.sites.ledger import Delivery, Ledger, Line, dealt_in, next_line, weights_of
from argosy.sync.sites.links import Links
from argosy.sync.sites.messages import Message
from argosy.sync.sites.others import Others
from argosy.sync.sites.pull import PIECE_BYTES
from argosy.sync.sites.standing import Standing, gives_way

REPEAT_S = 1.0
"""How often what matters is said again."""


class Exchange:
    """The exchange of one site."""

    def __init__(
        self,
        sites: Sites,
        ledger: Ledger,
        events: Events,
        links: Callable[[Exchange], Links],
        pool: Executor | None = None,
    ):
        """links(exchange): its connections. pool: where changes are encoded and summed."""
        self.sites, self._ledger, self._events = sites, ledger, events
        make_folder(sites.folder)
        self._pool = pool or ThreadPoolExecutor(1, "argosy-exchange")
        self._kept = Kept(sites)
        self._sent_bytes = 0
        self._status = ""
        self._said: set[str] = set()
        self._adoption = Adoption(sites, ledger)
        self._repeated_s = 0.0
        self._attempts = self._began_bytes = 0
        self._ready_s = 0.0
        self._line: Line | None = None
        self._line_from = ""
        self._assembly: Assembly | None = None
        self._quorum_s: float | None = None
        self._weights: dict[str, int] = {}
        self._begin()
        self._links = links(self)
        self._others = Others(sites, self._links)

    # ---- what it says of itself ---------------------------------------------------------------------------------

    @property
    def rounds(self) -> int:
        """Rounds in its ledger."""
        return len(self._ledger.lines)

    def hello(self) -> dict[str, Any]:
        """Return what this site says of itself."""
        return {"run": self.sites.identity, "model": self.sites.whole.identity, **self._standing().to_json()}

    def refused(self, who: str, why: str) -> None:
        """Note that a connection was refused, once for each reason."""
        if (said := f"{who}: {why}") not in self._said:
            self._said.add(said)
            self._events.write("site_refused", site=who, why=why)
            print(f"argosy: site {self.sites.me}: {who} is not let in: {why}; the run goes on", flush=True)

    @property
    def is_over(self) -> bool:
        """True once the run's last round is in the ledgers of all who are to have it."""
        last = self._ledger.last
        if last is None or self.rounds < self.sites.rounds:
            return False
        return all(self._others.standing(name).rounds >= self.rounds for name in last.members if name != self.sites.me)

    def turn(self, timeout_s: float) -> None:
        """Wait for something to happen, up to `timeout_s`, and do what follows from it."""
        before = set(self._links.sites)
        for name, message in self._links.turn(timeout_s):
            with suppress(KeyError, IndexError, TypeError, ValueError):  # what a site says wrongly has no effect
                self._hear(name, message)
        for name in before ^ set(self._links.sites):
            is_here = name in self._links.sites
            self._events.write("site_connected" if is_here else "site_lost", site=name)
        self._tend()
        self._show()

    def close(self) -> None:
        """End the conversation with all sites."""
        self._links.close()
        self._pool.shutdown(cancel_futures=True)

    # ---- what the others say ------------------------------------------------------------------------------------

    def _hear(self, name: str, message: Message) -> None:
        match message["kind"]:
            case "hello":
                self._note_at(name, message)
                self._introduce(name)
                self._adoption.connected_again(name)
                if self._assembly is not None:
                    self._assembly.connected_again(name)
            case "want_state":
                self._kept.read(name, self.rounds - 1)
                self._adoption.asked(name)
            case "state":
                self._adoption.hear(name, message)
            case "data" | "gone" if message["what"] in ("state", "ledger"):
                self._adoption.hear(name, message)
            case "at":
                self._note_at(name, message)
            case "want_line":
                for line in self._ledger.lines[int(message["round"]) :][:1]:
                    self._links.tell(name, "line", line=line.to_json())
            case "line":
                self._take_line(name, Line.from_json(message["line"]))
            case "get":
                self._serve(name, message)
            case _ if message.get("round") == self._number:
                self._hear_of_round(name, message)

    def _hear_of_round(self, name: str, message: Message) -> None:
        """Hear something about the round at hand."""
        if message["kind"] == "ready" and message["chain"] == self._chain():
            skipped = [(int(a), int(b)) for a, b in message["skipped"]]
            self._ready[name] = Delivery(int(message["tokens"]), skipped)
            self._attempts = max(self._attempts, int(message["attempt"]))
        elif (
            message["kind"] == "propose"
            and name == self._others.leader(self._number)
            and message["chain"] == self._chain()
        ):
            proposal = Proposal(int(message["attempt"]), tuple(map(str, message["names"])))
            self._work_on(proposal, {str(site): int(tokens) for site, tokens in message["tokens"].items()})
        elif self._assembly is None:
            return
        elif message["kind"] == "reduced":
            self._assembly.hear_reduced(name, message)
        elif message["kind"] == "data":
            what, start, at = str(message["what"]), int(message["start"]), int(message["at"])
            self._assembly.take(what, name, start, at, message["data"])
        elif message["kind"] == "gone":
            self._assembly.gone(str(message["what"]), name, int(message["start"]))

    def _introduce(self, name: str) -> None:
        """Tell a site what it may have missed."""
        self._links.tell(name, "at", **self._standing().to_json())
        if self.sites.me in self._ready:
            self._links.tell(name, "ready", **self._my_ready())
        if self._assembly is not None:
            if self._line is None and self._is_leader():
                self._links.tell(name, "propose", **self._my_proposal())
            for part in self._assembly.summed:
                self._links.tell(name, "reduced", **self._assembly.summary(part))

    def _note_at(self, name: str, message: Message) -> None:
        """Note where a site stands."""
        its = Standing.from_json(message)
        self._others.note(name, its)
        if its.rounds < self._number or its.adopts:
            self._has_lost_its_change(name)
        if its.rounds <= self.rounds:
            mine = self._ledger.lines[its.rounds - 1].chain if its.rounds else ""
            if its.chain != mine:
                self._went_apart(name)
            else:
                self._others.apart.discard(name)

    def _has_lost_its_change(self, name: str) -> None:
        """Forget that a site was ready: it was, and has come back with an older ledger, as its folder is gone.

        When it has caught up it makes its steps again, to another change, as it has a new inner optimizer. What was
        fetched of the old one must not be mixed with that: it is for a proposal of its own.
        """
        if self._ready.pop(name, None) is None or self._line is not None:
            return
        if self._assembly is not None and name in self._assembly.proposal.names:
            self._let_go()

    def _went_apart(self, name: str) -> None:
        """Give way to a site that has gone on without this one and otherwise, or leave that to it."""
        self._others.apart.add(name)
        its = self._others.standing(name)
        if not self._adoption.is_under_way and gives_way(self.sites.me, self._standing(), name, its, self.sites.names):
            self._events.write("site_gives_way", site=name, rounds=self.rounds, its_rounds=its.rounds)
            self._adopt_from(name)

    def _adopt_from(self, name: str) -> None:
        self._adoption.begin(name, self._links.tell)
        self._links.tell_all("at", **self._standing().to_json())

    def _take_line(self, name: str, line: Line) -> None:
        """Take the line of the round at hand; the average is fetched before it counts."""
        if line.round != self._number or self._line is not None:
            return
        if line.chained(self._chain()) != line.chain:
            self._went_apart(name)
            return
        self._line, self._line_from = line, name
        proposal = Proposal(line.attempt, tuple(site for site in self.sites.names if site in line.tokens))
        self._work_on(proposal, self._weights_of(line.tokens))

    def _serve(self, name: str, message: Message) -> None:
        """Send a piece of something that this site has."""
        what, number, start = str(message["what"]), int(message["round"]), int(message["start"])
        at, size = int(message["at"]), min(int(message["bytes"]), PIECE_BYTES)
        key = {"what": what, "round": number, "start": start}
        path, base = None, 0
        if what in ("average", "state"):
            self._kept.read(name, number)
        if number < self.rounds and what in ("slice", "average"):
            path = self.sites.average(number)
        elif what == "sent" and number == self._number and self.sites.me in self._ready:
            path = self.sites.sent(number)  # one that was left there before may not be whole
        elif what == "state":
            path = self.sites.state(number)
        elif what == "ledger":
            path = self._ledger.path
        elif what == "slice" and number == self._number and self._assembly is not None:
            path, base = self._assembly.slice_file(int(message["attempt"]), start) or (None, 0)
        try:
            if path is None:
                raise FileNotFoundError
            with path.open("rb") as file:
                file.seek(start + at - base)
                data = file.read(size)
            if len(data) < size:
                raise FileNotFoundError  # another one lies there by now
        except FileNotFoundError:
            self._links.tell(name, "gone", **key)
            return
        self._sent_bytes += len(data)
        self._links.tell(name, "data", data, **key, at=at)

    # ---- the round at hand --------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Begin with the round after those in the ledger."""
        self._let_go()
        self._number = self.rounds
        self._ready: dict[str, Delivery] = {}
        self._encoding: Future[None] | None = None
        self._attempts = 0
        self._quorum_s = None
        self._line = None
        self._began_bytes = self._sent_bytes
        self._ready_s = 0.0
        self._asked_s = 0.0
        self._members = frozenset(dealt_in(self.sites.shares, self._ledger.lines, self._number))

    def _tend(self) -> None:
        """Do what can be done now."""
        self._repeat()
        self._adoption.offer(self._links.tell)
        self._adoption.check(self._others.is_alive)
        if self.sites.lost.exists() and self._links.sites and not self._adoption.is_under_way:
            self._adopt_from(max(self._links.sites, key=lambda name: self._others.standing(name).rounds))
        if self._adoption.is_under_way:
            if self._adoption.tend(self._links.tell):
                self._events.write("state_taken", rounds=self.rounds)
                self._others.apart.clear()
                self._begin()
            return
        if self._number >= self.sites.rounds:
            return
        if self.sites.me not in self._ready:
            self._make_ready()
        self._follow()
        if self._line is None:
            self._lead()
        if self._assembly is None:
            return
        if self._line is not None:
            holder = self._others.holder(self._number)
            if self._assembly.is_lost and holder is not None:
                self._adopt_from(holder)
                return
            self._assembly.complete(self._line, holder)
        self._assembly.tend()
        if self._assembly.is_whole:
            if self._line is None and self._is_leader() and self._ready.keys() >= set(self._weights):
                self._line = self._agreed(self._assembly)
            if self._line is not None:
                self._finish(self._assembly, self._line)

    def _follow(self) -> None:
        """Ask for the line of the round at hand, if another site has it; forget a line whose average nobody has."""
        holder, now = self._others.holder(self._number), time.monotonic()
        if self._line is None:
            if holder is not None and now - self._asked_s > REPEAT_S:
                self._asked_s = now
                self._links.tell(holder, "want_line", round=self._number)
        elif holder is None and not self._others.is_alive(self._line_from):
            self._line = None  # who told it is gone: the others decide again
            self._let_go()

    def _repeat(self) -> None:
        """Say again what others may not have taken, as they were not in this round yet."""
        if time.monotonic() - self._repeated_s > REPEAT_S:
            self._repeated_s = time.monotonic()
            for name in list(self._links.sites):
                self._introduce(name)
            self._adoption.again(self._links.tell)

    def _make_ready(self) -> None:
        """Encode what the ranks changed, once it is there, and tell the others."""
        if self._encoding is None:
            if self.sites.about(self._number).exists() and self.sites.me in self._members:
                files = (
                    self.sites.change(self._number),
                    self.sites.wire_of(self._number),
                    self.sites.sent(self._number),
                )
                self._encoding = self._pool.submit(encode_file, *files)
        elif self._encoding.done():
            self._encoding.result()
            about = json.loads(self.sites.about(self._number).read_bytes())
            skipped = [(int(a), int(b)) for a, b in about["skipped"]]
            self._ready[self.sites.me] = Delivery(int(about["tokens"]), skipped)
            self._ready_s = time.monotonic()
            fault("site_ready", step=self._number)
            self._links.tell_all("ready", **self._my_ready())

    def _lead(self) -> None:
        """Say who takes part, once all members are ready, or a quorum is and the others were waited for."""
        now = time.monotonic()
        here = [n for n in self.sites.names if n in self._ready and n in self._members and self._others.is_connected(n)]
        self._quorum_s = None if len(here) < self.sites.quorum else self._quorum_s or now
        if self._quorum_s is None or not self._is_leader() or self._others.holder(self._number) is not None:
            return
        if self._assembly is not None:
            if all(self._others.is_alive(name) for name in self._assembly.proposal.names):
                return
        elif not self._expected() <= set(here) and now - self._quorum_s < self.sites.run.sync.patience_s:
            return
        tokens = {name: self._ready[name].tokens for name in here}
        self._work_on(Proposal(self._attempts + 1, tuple(here)), self._weights_of(tokens))
        self._links.tell_all("propose", **self._my_proposal())

    def _expected(self) -> set[str]:
        """Return the members of the round at hand, without those that were waited for in the last one and are gone."""
        last = self._ledger.last
        return set(self._members if last is None else self._members & (last.tokens.keys() | self._near()))

    def _near(self) -> set[str]:
        """Return the sites whose ranks have nearly come to the round at hand."""
        mine = self._standing()
        return {name for name in self.sites.names if self._others.is_near(name, self._number, mine)}

    def _work_on(self, proposal: Proposal, weights: dict[str, int]) -> None:
        """Work on this proposal from now on, if it is a later one than that at hand, or decided."""
        if self._assembly is not None:
            at_hand = self._assembly.proposal
            if at_hand == proposal or (proposal.attempt < at_hand.attempt and self._line is None):
                return
        self._let_go()
        self._attempts = max(self._attempts, proposal.attempt)
        self._weights = weights
        self._assembly = Assembly(self.sites, self._number, proposal, weights, self._links, self._pool)

    def _let_go(self) -> None:
        if self._assembly is not None:
            self._assembly.abandon()
        self._assembly = None

    def _agreed(self, assembly: Assembly) -> Line:
        """Return the line of the round: this site leads, and has all of the average."""
        names = assembly.proposal.names
        extra: dict[str, Any] = distances(names, assembly.products, assembly.weights)
        return next_line(
            self.sites.shares,
            self._ledger.lines,
            self.sites.me,
            {name: self._ready[name] for name in names},
            self._near(),
            assembly.proposal.attempt,
            [assembly.reduced[part].checksum for part in range(assembly.slices.parts)],
            extra,
        )

    def _finish(self, assembly: Assembly, line: Line) -> None:
        """Write the average and the line down, and tell the others."""
        assembly.write(self.sites.average(line.round))
        assembly.abandon()
        fault("site_agreed", step=line.round)
        sent, received = self._sent_bytes - self._began_bytes, assembly.received_bytes
        with atomic_write(self.sites.traffic(line.round)) as file:
            file.write(json.dumps({"sent_bytes": sent, "received_bytes": received}).encode())
        self._ledger.append(line)
        self._links.tell_all("line", line=line.to_json())
        self._links.tell_all("at", **self._standing().to_json())
        left_out = sorted(set(self._members) - set(line.tokens))
        facts = {"participants": list(line.tokens), "left_out": left_out, "by": line.by}
        took_s = round(time.monotonic() - self._ready_s, 3) if self._ready_s else None
        self._events.write("round", round=line.round, **facts, sent_bytes=sent, received_bytes=received, seconds=took_s)
        self._kept.sweep(line.round)
        self._begin()

    # ---- words --------------------------------------------------------------------------------------------------

    def _is_leader(self) -> bool:
        return self._others.leader(self._number) == self.sites.me

    def _weights_of(self, tokens: dict[str, int]) -> dict[str, int]:
        """Return the weights of the sites' changes in the round at hand, for the tokens of the round."""
        return weights_of(self._ledger.lines, tokens, self.sites.rounds_of_change(self._number))

    def _chain(self) -> str:
        return "" if self._ledger.last is None else self._ledger.last.chain

    def _standing(self) -> Standing:
        """Return where this site stands."""
        reached = 0
        with suppress(OSError, ValueError):
            reached = int(self.sites.reached.read_text())
        adopts = self._adoption.is_under_way
        return Standing(self.rounds, self._chain(), self._ledger.tokens, reached, adopts)

    def _my_ready(self) -> dict[str, Any]:
        mine = self._ready[self.sites.me]
        return {
            "round": self._number,
            "tokens": mine.tokens,
            "skipped": mine.skipped,
            "attempt": self._attempts,
            "chain": self._chain(),
        }

    def _my_proposal(self) -> dict[str, Any]:
        assert self._assembly is not None
        proposal = self._assembly.proposal
        names = list(proposal.names)
        facts = {"attempt": proposal.attempt, "names": names, "tokens": self._weights}
        return {"round": self._number, "chain": self._chain(), **facts}

    def _show(self) -> None:
        """Leave for the ranks whom the round waits for."""
        waiting = [name for name in self.sites.names if name in self._members and name not in self._ready]
        is_short = len([n for n in self._ready if self._others.is_connected(n)]) < self.sites.quorum
        status = {
            "connected": sorted(self._links.sites),
            "waiting_for": waiting,
            "round": self._number,
            "quorum_missing": is_short,
        }
        text = json.dumps(status)
        if text != self._status:
            self._status = text
            temporary = self.sites.status.with_suffix(".partial")
            temporary.write_text(text)
            temporary.replace(self.sites.status)
