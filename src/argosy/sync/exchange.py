"""The exchange: the one process of a site that speaks to the other sites. Its ranks and it speak through files.

A round: each site's ranks leave what they changed (`Sites.change`); the exchanges tell each other that they are ready;
the leader says who takes part; they sum (`assembly`); when the leader has all of the average it writes the round's line
to its ledger and sends it to the others. A site's ranks go on once the line is in their own ledger. What is not in a
ledger has no effect, so any process may die at any moment.

Each second every exchange says where it stands (`SiteProgress`). From that follows all else:
- The leader is the first site of the run file that is not behind and was heard within sync.patience_s.
- A site that is behind asks another for the line of the round at hand, then for its average, one round after another.
- Members of the next round are the sites that took part in this one, and those whose ranks have nearly caught up
  (`links.BEHIND`). Nobody waits for a site that is further away.
- Of sites that have gone apart, one gives way (`messages.gives_way`) and takes the other's state (`site_recovery`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor

from argosy.faults import fault
from argosy.files import make_folder, write_unsynced
from argosy.observe.events import Events
from argosy.processes.connection import BadMessage, encoded
from argosy.sync import messages as say
from argosy.sync.assembly import Assembly, Proposal, read_piece
from argosy.sync.average import RetainedAverages, distances, encode_file, slices_of
from argosy.sync.layout import LeftChange, RoundTraffic, RoundWait, Sites, read_record, write_record
from argosy.sync.ledger import Contribution, Line, RoundLedger, chain_of, dealt_in, is_next, next_line, weights_of
from argosy.sync.links import Links, PeerTable
from argosy.sync.messages import SiteProgress
from argosy.sync.site_recovery import SiteRecovery

RESEND_S = 1.0
"""Seconds after which what matters is said again."""
MOST_ATTEMPTS = 1 << 20
"""No site is so many attempts at a round ahead of another."""


class SiteExchange:
    def __init__(
        self,
        sites: Sites,
        ledger: RoundLedger,
        events: Events,
        links: Callable[[SiteExchange], Links[say.FromSite]],
        pool: Executor | None = None,
    ):
        """links(exchange): its connections. pool: where changes are encoded and summed."""
        self.sites, self._ledger, self._events = sites, ledger, events
        make_folder(sites.folder)
        self._pool = pool or ThreadPoolExecutor(1, "argosy-exchange")
        self._kept = RetainedAverages(sites)
        self._sent_bytes = 0
        self._shown: RoundWait | None = None
        self._repeated_s = 0.0
        self._attempts = self._began_bytes = 0
        self._ready_s = 0.0
        self._line: Line | None = None
        self._line_from = ""
        self._assembly: Assembly | None = None
        self._quorum_s: float | None = None
        self._apart_s: float | None = None
        """Since when sites of the proposal at hand have not been connected with each other."""
        self._weights: dict[str, int] = {}
        self._begin()
        self._links = links(self)
        self._others = PeerTable(sites, self._links)
        self._recovery = SiteRecovery(sites, ledger, events, self._links, self._others)

    # ---- what it says of itself ---------------------------------------------------------------------------------

    @property
    def rounds(self) -> int:
        return len(self._ledger.lines)

    def hello(self) -> say.SiteHello:
        sites = self.sites
        about = {"run": sites.identity, "model": sites.whole.identity}
        return say.SiteHello(version=say.VERSION, site=sites.me, standing=self._recovery.standing(), **about)

    def refused(self, who: str, why: str) -> None:
        self._events.write("site_refused", site=who, why=why)
        print(f"argosy: site {self.sites.me}: {who} is not let in: {why}; the run goes on", flush=True)

    @property
    def is_over(self) -> bool:
        """True once the last round before the run's end or pause is in the ledgers of all sites that are to have it."""
        last = self._ledger.last
        if last is None or self.rounds < self.sites.rounds_due:
            return not self.sites.rounds_due
        return all(self._others.standing(name).rounds >= self.rounds for name in last.members if name != self.sites.me)

    def turn(self, timeout_s: float) -> None:
        """Wait for something to happen, up to `timeout_s`, and do what follows from it."""
        before = set(self._links.sites)
        for name, message, data in self._links.turn(timeout_s):
            try:
                self._hear(name, message, data)
            except BadMessage as problem:
                self._links.refuse(name, f"its message contradicts itself or the round ({problem})")
        for name in before ^ set(self._links.sites):
            is_here = name in self._links.sites
            self._events.write("site_connected" if is_here else "site_lost", site=name)
        self._tend()
        self._show()

    def close(self) -> None:
        self._links.close()
        self._pool.shutdown(cancel_futures=True)

    # ---- what the others say ------------------------------------------------------------------------------------

    def _hear(self, name: str, message: say.FromSite, data: bytes) -> None:
        """Do what follows from a message. Raises: BadMessage if no site of this run can say it."""
        match message:
            case say.SiteHello():
                self._note_at(name, message.standing)
                self._introduce(name)
                self._recovery.adoption.connected_again(name)
                if self._assembly is not None:
                    self._assembly.connected_again(name)
            case say.StateRequest():
                self._kept.read(name, self.rounds - 1)
                self._recovery.adoption.asked(name)
            case say.StateOffer() | say.FilePiece(what="state" | "ledger") | say.BytesMissing(what="state" | "ledger"):
                self._recovery.adoption.hear(name, message, data)
            case say.ProgressNotice():
                self._note_at(name, message.standing)
            case say.LineRequest():
                for line in self._ledger.lines[message.round :][:1]:
                    self._links.tell(name, say.LineNotice(line=line))
            case say.LineNotice():
                self._take_line(name, message.line)
            case say.PieceRequest():
                self._serve(name, message)
            case say.ReadyNotice() | say.ProposalNotice() | say.SliceSummed() | say.FilePiece() | say.BytesMissing():
                if message.round == self._number:
                    self._hear_of_round(name, message, data)

    def _hear_of_round(self, name: str, message: say.OfRound, data: bytes) -> None:
        is_leader = name == self._others.leader(self._number)
        match message:
            case say.ReadyNotice(chain=chain) if chain == self._chain():
                self._count(message.attempt)
                self._ready[name] = Contribution(message.tokens, message.skipped)
            case say.ProposalNotice(chain=chain) if chain == self._chain() and is_leader:
                names = tuple(message.weights)
                if names != tuple(site for site in self.sites.names if site in names):
                    raise BadMessage("it proposes sites that are not this run's, or in another order")
                self._work_on(Proposal(message.attempt, names), message.weights)
            case say.SliceSummed() if self._assembly is not None:
                self._assembly.hear_reduced(name, message)
            case say.FilePiece() if self._assembly is not None:
                self._assembly.take(name, message, data)
            case say.BytesMissing() if self._assembly is not None:
                self._assembly.gone(name, message)

    def _introduce(self, name: str) -> None:
        """Tell a site what it may have missed."""
        self._links.tell(name, say.ProgressNotice(standing=self._recovery.standing()))
        if self.sites.me in self._ready:
            self._links.tell(name, self._my_ready())
        if self._assembly is not None:
            if self._line is None and self._is_leader():
                self._links.tell(name, self._my_proposal(self._assembly.proposal))
            for part in self._assembly.summed:
                self._links.tell(name, self._assembly.summary(part))

    def _note_at(self, name: str, its: SiteProgress) -> None:
        if its.rounds > self.sites.rounds:
            raise BadMessage(f"its ledger has {its.rounds} rounds, and the run {self.sites.rounds}")
        self._others.note(name, its)
        if its.rounds < self._number or its.adopts:
            self._has_lost_its_change(name)
        if its.rounds <= self.rounds:
            if its.chain != chain_of(self._ledger.lines[: its.rounds]):
                self._recovery.went_apart(name)
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

    def _take_line(self, name: str, line: Line) -> None:
        """Take the line of the round at hand; the average is fetched before it counts."""
        if self._recovery.is_under_way:
            self._recovery.hear_line(name, line)
            return
        if line.round != self._number or self._line is not None:
            return
        if line.chained(self._chain()) != line.chain:
            self._recovery.went_apart(name)
            return
        is_sound = is_next(self.sites.shares, self._ledger.lines, line)
        if not is_sound or len(line.sums) != slices_of(self.sites, self._number, len(line.tokens)).parts:
            raise BadMessage(f"the line of round {line.round} does not follow from those before")
        self._count(line.attempt)
        self._line, self._line_from = line, name
        proposal = Proposal(line.attempt, tuple(site for site in self.sites.names if site in line.tokens))
        self._work_on(proposal, self._weights_of(line.tokens))

    def _serve(self, name: str, wanted: say.PieceRequest) -> None:
        """Send a piece of something that this site has."""
        what, number, start = wanted.what, wanted.round, wanted.start
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
            path, base = self._assembly.slice_file(wanted.attempt, start) or (None, 0)
        data = None if path is None else read_piece(path, start + wanted.at - base, wanted.bytes)
        if data is None:
            self._links.tell(name, say.BytesMissing(what=what, round=number, start=start))
            return
        self._sent_bytes += len(data)
        self._links.tell(name, say.FilePiece(what=what, round=number, start=start, at=wanted.at), data)

    # ---- the round at hand --------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._let_go()
        self._number = self.rounds
        self._ready: dict[str, Contribution] = {}
        self._encoding: Future[None] | None = None
        self._attempts = 0
        self._quorum_s = self._apart_s = None
        self._line = None
        self._began_bytes = self._sent_bytes
        self._ready_s = 0.0
        self._asked_s = 0.0
        self._members = frozenset(dealt_in(self.sites.shares, self._ledger.lines, self._number))

    def _tend(self) -> None:
        self._repeat()
        if self._recovery.tend():
            self._begin()
        if self._recovery.is_under_way or self._number >= self.sites.rounds:
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
                self._recovery.adopt_from(holder)
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
            if holder is not None and now - self._asked_s > RESEND_S:
                self._asked_s = now
                self._links.tell(holder, say.LineRequest(round=self._number))
        elif holder is None and not self._others.is_alive(self._line_from):
            self._line = None  # who told it is gone: the others decide again
            self._let_go()

    def _repeat(self) -> None:
        """Say again what others may not have taken, as they were not in this round yet."""
        if time.monotonic() - self._repeated_s > RESEND_S:
            self._repeated_s = time.monotonic()
            for name in list(self._links.sites):
                self._introduce(name)
            self._recovery.adoption.again()

    def _make_ready(self) -> None:
        """Encode what the ranks changed, once it is there, and tell the others."""
        if self._encoding is None:
            # As long as the ranks are to take another state over, what they have left is of the one before.
            is_there = self.sites.about(self._number).exists() and not self.sites.adoption.exists()
            if is_there and self.sites.me in self._members:
                files = (
                    self.sites.change(self._number),
                    self.sites.wire_of(self._number),
                    self.sites.sent(self._number),
                )
                self._encoding = self._pool.submit(encode_file, *files)
        elif self._encoding.done():
            self._encoding.result()
            about = read_record(self.sites.about(self._number), LeftChange)
            self._ready[self.sites.me] = Contribution(about.tokens, about.skipped)
            self._ready_s = time.monotonic()
            fault("site_ready", step=self._number)
            self._links.tell_all(self._my_ready())

    def _lead(self) -> None:
        """Name the sites of a round once all members are ready, or a quorum is and the wait for others is over."""
        now = time.monotonic()
        here = [n for n in self.sites.names if n in self._ready and n in self._members and self._others.is_connected(n)]
        here = self._others.together(here)
        self._quorum_s = None if len(here) < self.sites.quorum else self._quorum_s or now
        if self._quorum_s is None or not self._is_leader() or self._others.holder(self._number) is not None:
            return
        if self._assembly is not None:
            names = self._assembly.proposal.names
            self._apart_s = None if set(names) <= set(here) else self._apart_s or now
            is_apart = self._apart_s is not None and now - self._apart_s >= self.sites.run.sync.patience_s
            if not is_apart and all(map(self._others.is_alive, names)):
                return
        elif not self._expected() <= set(here) and now - self._quorum_s < self.sites.run.sync.patience_s:
            return
        tokens = {name: self._ready[name].tokens for name in here}
        self._apart_s = None
        proposal = Proposal(self._next_attempt(), tuple(here))
        self._work_on(proposal, self._weights_of(tokens))
        self._links.tell_all(self._my_proposal(proposal))

    def _next_attempt(self) -> int:
        """Return the number of the next proposal: later than those before, and never that of another site's. Where two
        lead, as one of them does not hear the other, a slice of one proposal must not pass for that of the other.
        """
        number, names = self._attempts + 1, self.sites.names
        return number + (names.index(self.sites.me) + 1 - number) % len(names)

    def _expected(self) -> set[str]:
        """Return the members of the round at hand, without those that were waited for in the last one and are gone."""
        last = self._ledger.last
        return set(self._members if last is None else self._members & (last.tokens.keys() | self._near()))

    def _near(self) -> set[str]:
        """Return the sites whose ranks have nearly come to the round at hand, and that can exchange their changes."""
        mine = self._recovery.standing()
        return set(self._others.together([n for n in self.sites.names if self._others.is_near(n, self._number, mine)]))

    def _work_on(self, proposal: Proposal, weights: dict[str, int]) -> None:
        """Work on this proposal from now on, unless one of the same site is at hand that is later, or it is decided."""
        if self._assembly is not None:
            at_hand = self._assembly.proposal
            is_of_same = (at_hand.attempt - proposal.attempt) % len(self.sites.names) == 0  # `_next_attempt`
            if at_hand == proposal or (is_of_same and proposal.attempt < at_hand.attempt and self._line is None):
                return
        self._count(proposal.attempt)
        self._let_go()
        self._weights = weights
        self._assembly = Assembly(self.sites, self._number, proposal, weights, self._links, self._pool)

    def _count(self, attempt: int) -> None:
        """Note that others are at this attempt at the round. Raises: BadMessage."""
        if attempt > self._attempts + MOST_ATTEMPTS:
            raise BadMessage(f"attempt {attempt}")
        self._attempts = max(self._attempts, attempt)

    def _let_go(self) -> None:
        if self._assembly is not None:
            self._assembly.abandon()
        self._assembly = None

    def _agreed(self, assembly: Assembly) -> Line:
        """Return the line of the round: this site leads, and has all of the average."""
        names = assembly.proposal.names
        return next_line(
            self.sites.shares,
            self._ledger.lines,
            self.sites.me,
            {name: self._ready[name] for name in names},
            self._near(),
            assembly.proposal.attempt,
            [assembly.reduced[part].checksum for part in range(assembly.slices.parts)],
            distances(names, assembly.products, assembly.weights),
        )

    def _finish(self, assembly: Assembly, line: Line) -> None:
        """Write the average and the line down, and tell the others."""
        assembly.write(self.sites.average(line.round))
        assembly.abandon()
        fault("site_agreed", step=line.round)
        sent, received = self._sent_bytes - self._began_bytes, assembly.received_bytes
        write_record(self.sites.traffic(line.round), RoundTraffic(sent_bytes=sent, received_bytes=received))
        self._ledger.append(line)
        self._links.tell_all(say.LineNotice(line=line))
        self._links.tell_all(say.ProgressNotice(standing=self._recovery.standing()))
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
        return chain_of(self._ledger.lines)

    def _my_ready(self) -> say.ReadyNotice:
        mine, number, attempt = self._ready[self.sites.me], self._number, self._attempts
        return say.ReadyNotice(
            round=number, chain=self._chain(), attempt=attempt, tokens=mine.tokens, skipped=mine.skipped
        )  # fmt: skip

    def _my_proposal(self, proposal: Proposal) -> say.ProposalNotice:
        weights = {name: self._weights[name] for name in proposal.names}
        return say.ProposalNotice(round=self._number, chain=self._chain(), attempt=proposal.attempt, weights=weights)

    def _show(self) -> None:
        """Write down for the ranks which sites the round waits for."""
        waiting = [name for name in self.sites.names if name in self._members and name not in self._ready]
        is_short = len([n for n in self._ready if self._others.is_connected(n)]) < self.sites.quorum
        shown = RoundWait(
            connected=sorted(self._links.sites), waiting_for=waiting, round=self._number, quorum_missing=is_short
        )
        if shown != self._shown:
            self._shown = shown
            write_unsynced(self.sites.status, encoded(shown))
