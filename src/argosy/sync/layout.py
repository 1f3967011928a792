"""Facts that all processes of a run of several parts derive from the run file: names, rounds, vectors, files.

`Sites` for sites that agree in rounds; `ServerLayout` for parameter servers and their workers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import Field, TypeAdapter

from argosy.config.identity import lasting_values
from argosy.config.launch import host_and_port
from argosy.config.schema import RunConfig
from argosy.config.sync import batches_of, server_name, server_number
from argosy.data.order import Range
from argosy.files import atomic_write
from argosy.plan.parameters import parameter_table, trained_shapes
from argosy.plan.plan import way_of_sites, with_sync, words_of
from argosy.processes.connection import Count, WireRecord, decoded, encoded
from argosy.sync.deal import Shares
from argosy.sync.ledger import Chain, Crc, Ranges, SiteName, Tokens
from argosy.sync.wire import Flat, WireFormat, flats_of

EXCHANGE_FOLDER = "exchange"
SITES = "sites"
"""The folder, in that of the whole run, of its sites' folders."""
OF_A_SITE = ("train.global_batch", "site", "sites")
"""Keys that differ between the sites of a run."""
OF_A_PART = ("site", "sites", "sync", "train.steps")
"""Keys that may differ between servers and workers of a run, or that servers check otherwise."""
RESTARTED = "--again"
"""The word of the command that starts a server in place of one that died."""


class LeftChange(WireRecord):
    """Facts about what the ranks of a site changed in a round, for its exchange."""

    tokens: Tokens
    """Tokens that the site trained on in the round."""
    skipped: Ranges
    """Samples of the round that no update was made from."""
    needs_round: Count
    """The first round whose average the site's oldest checkpoint would need."""


class LeftState(WireRecord):
    """Facts about an outer state that the ranks of a site have left for another site."""

    bytes: Count
    sum: Crc


class AdoptedState(WireRecord):
    """Facts about another site's outer state that the ranks are to go on from."""

    rounds: Annotated[Count, Field(ge=1)]
    """Rounds that it comes after."""
    chain: Chain
    """Chain of the last of those rounds."""


class RoundTraffic(WireRecord):
    """Bytes that a site's exchange has sent and received in a round."""

    sent_bytes: Count
    received_bytes: Count


class RoundWait(WireRecord):
    """Sites that a round waits for, as a site's exchange tells its ranks."""

    connected: list[SiteName]
    waiting_for: list[SiteName]
    round: Count
    quorum_missing: bool
    """True if fewer sites are ready than a round needs."""


RecordT = TypeVar("RecordT", bound=WireRecord)


def write_record(path: Path, record: WireRecord) -> None:
    """Write what the ranks and the exchange of a site tell each other. Raises: OSError."""
    with atomic_write(path) as file:
        file.write(encoded(record))


def read_record(path: Path, kind: type[RecordT]) -> RecordT:
    """Return what `write_record` wrote. Raises: OSError, BadMessage if it is anything else."""
    return decoded(path.read_bytes(), TypeAdapter(kind))


class Sites:
    """The sites of a run, seen from one of them."""

    def __init__(self, run: RunConfig, folder: Path):
        """folder: where the site's exchange keeps its files."""
        self.run, self.folder, self.me = run, folder, run.site
        self.names = tuple(site.name for site in run.sites)
        """In the order of the run file."""
        self.quorum = run.sync.quorum or len(self.names) // 2 + 1
        """Sites that a round needs at least."""
        self.wire = WireFormat(run.sync.wire)
        self.want_state = folder / "want-state"
        """A file, there while another site wants the whole outer state: the ranks leave it at their next outer step."""
        self.adopted = folder / "adopted.f32"
        """The file of another site's outer state that this site is to go on from."""
        self.adoption = folder / "adopted.json"
        """The file of its AdoptedState; there once it is whole, until a checkpoint has it."""
        self.reached = folder / "reached"
        """The file with the number of rounds that the ranks have made: they train in the next one, or wait for it."""
        self.adopted_at = folder / "adopted-at"
        """The file with the step from which on checkpoints follow from the ledger; older ones may have gone apart."""
        self.lost = folder / "lost"
        """A file, there while the ranks lack an average of the ledger: another site's state is to be taken over."""
        self.damaged = folder / "damaged"
        """A file, there when the ranks have found a line of the ledger that is not what was written."""
        self.status = folder / "status.json"
        """The file of the RoundWait."""

    @classmethod
    def of(cls, run: RunConfig, run_dir: Path) -> Sites:
        """Return the sites of a run whose folder at this site is `run_dir`."""
        return cls(run, run_dir / EXCHANGE_FOLDER)

    @cached_property
    def shares(self) -> Shares:
        """The samples that each site takes."""
        ahead = 2 if self.run.sync.overlap_steps else 1
        batches = tuple(site.batch for site in self.run.sites)
        return Shares(self.names, batches, self.round_steps, self.run.sync.from_step, ahead)

    def reached_round(self) -> int:
        """Return the number in the file `reached`; 0 if there is none."""
        with suppress(OSError, ValueError):
            return int(self.reached.read_text())
        return 0

    @property
    def round_steps(self) -> int:
        """Steps of a round: with fragments, each round is one fragment's."""
        return self.run.sync.every_steps // self.run.sync.fragments

    @cached_property
    def rounds(self) -> int:
        """Rounds of the whole run; the last one may be shorter."""
        return self.shares.round_of(self.run.train.steps - 1) + 1

    @cached_property
    def rounds_due(self) -> int:
        """Rounds that a site needs to come to the run's end, or to where it pauses (train.pause_at)."""
        pause = self.run.train.pause_at
        return self.rounds_at(pause) if 0 < pause < self.run.train.steps else self.rounds

    def sums_gradients(self, number: int) -> bool:
        """Return True for a round of one step in which the sites sum gradients: those before sync.from_step."""
        return number < self.shares.from_step

    def wire_of(self, number: int) -> WireFormat:
        """Return the number format of what travels in a round: gradients are summed exactly."""
        return WireFormat("fp32") if self.sums_gradients(number) else self.wire

    @cached_property
    def flats(self) -> Sequence[Flat]:
        """The fragments, in the order of their turns."""
        return flats_of(self.whole.shapes, self.run.sync.fragments)

    @cached_property
    def whole(self) -> Flat:
        """All parameters that are trained."""
        return Flat(trained_shapes(self.run))

    def is_last(self, number: int) -> bool:
        """Return True for the run's last round, which is about all parameters, so that sites end alike."""
        return number == self.rounds - 1

    def turn(self, number: int) -> Flat:
        """Return the fragment whose turn it is in round `number`."""
        return self.flats[(number - self.shares.from_step) % len(self.flats)]

    def flat(self, number: int) -> Flat:
        """Return the parameters that round `number` is about."""
        return self.whole if self.is_last(number) or self.sums_gradients(number) else self.turn(number)

    def end_of(self, number: int) -> int:
        """Return how many steps are done when round `number` ends: then a site sends what it changed."""
        return min(self.shares.start(number + 1), self.run.train.steps)

    def merge_after(self, number: int) -> int:
        """Return how many steps are done when a site takes the average of round `number` over."""
        overlap = 0 if self.sums_gradients(number) else self.run.sync.overlap_steps
        return min(self.end_of(number) + overlap, self.run.train.steps)

    def rounds_of_change(self, number: int) -> int:
        """Return how many rounds what changed in round `number` comes from, up to that round."""
        return 1 if self.sums_gradients(number) else min(len(self.flats), number - self.shares.from_step + 1)

    def rounds_at(self, step: int) -> int:
        """Return how many averages a site has taken over when `step` steps are done, before the run's last one."""
        first = min(step, self.shares.from_step)
        return self.shares.round_of(max(first, step - self.run.sync.overlap_steps))

    @cached_property
    def identity(self) -> str:
        """Sixteen hexadecimal digits that differ for another run, model or way to agree."""
        lasting = {key: value for key, value in lasting_values(self.run).items() if key.split(".")[0] not in OF_A_SITE}
        lasting = {key: value for key, value in lasting.items() if key not in OF_A_SITE}
        lasting |= {"sites": list(zip(self.names, self.shares.batches, strict=True)), "steps": self.run.train.steps}
        lasting["sync"] = way_of_sites(self.run.plan)
        return _digits(lasting)

    # ---- files --------------------------------------------------------------------------------------------------

    def change(self, number: int) -> Path:
        """Return the file of what the ranks changed in a round, fp32; beside it, once it is whole, `about`."""
        return self.folder / f"change-{number:08d}.f32"

    def about(self, number: int) -> Path:
        """Return the file of its LeftChange."""
        return self.folder / f"change-{number:08d}.json"

    def sent(self, number: int) -> Path:
        return self.folder / f"sent-{number:08d}.bin"

    def average(self, number: int) -> Path:
        """Return the file of the mean of all changes, as it was sent; the ledger has the round once it is whole."""
        return self.folder / f"average-{number:08d}.bin"

    def traffic(self, number: int) -> Path:
        """Return the file of a round's RoundTraffic."""
        return self.folder / f"traffic-{number:08d}.json"

    def state(self, number: int) -> Path:
        """Return the file of the outer state after a round: of each fragment the weights, then the momentum, fp32."""
        return self.folder / f"state-{number:08d}.f32"

    def state_about(self, number: int) -> Path:
        """Return the file of its LeftState, there once it is whole."""
        return self.state(number).with_suffix(".json")


class ServerLayout:
    """The servers and workers of a run."""

    def __init__(self, run: RunConfig):
        self.run = run
        self.workers = tuple(site.name for site in run.sites)
        self.servers = run.sync.server_count
        self.local_steps = run.sync.local_steps
        """Steps that an update is made from: those of one item."""

    @property
    def addresses(self) -> dict[str, tuple[str, int]]:
        return {server_name(number): host_and_port(text) for number, text in enumerate(self.run.sync.servers)}

    @property
    def updates(self) -> int:
        return self.run.train.steps // self.local_steps

    def step_of(self, version: int) -> int:
        """Return how many steps are done with a version of the weights."""
        return version * self.local_steps

    def version_of(self, step: int) -> int:
        """Return the version of the weights of a checkpoint of that step."""
        return step // self.local_steps

    @property
    def item_samples(self) -> int:
        return self.local_steps * self.run.train.global_batch

    def samples(self, item: int) -> list[Range]:
        return [(item * self.item_samples, (item + 1) * self.item_samples)]

    def samples_of_step(self, item: int, number: int) -> Range:
        """Return the run's samples of one of the local steps that an update is made from."""
        first = item * self.item_samples + number * self.run.train.global_batch
        return first, first + self.run.train.global_batch

    @cached_property
    def wire(self) -> WireFormat:
        return WireFormat(self.run.sync.wire)

    @cached_property
    def flats(self) -> Sequence[Flat]:
        """The parameters of each server as one vector, under any plan of the workers."""
        shapes = {name: parameter.shape for name, parameter in parameter_table(self.run.model).items()}
        return dealt_out(shapes, self.servers)

    @property
    def model(self) -> str:
        """Sixteen hexadecimal digits that differ for another model, or another way to deal it out."""
        return _digits([flat.identity for flat in self.flats])

    @property
    def identity(self) -> str:
        """Sixteen hexadecimal digits that differ for a run of other samples, optimizer or length."""
        lasting = {key: value for key, value in lasting_values(self.run).items() if not key.startswith(OF_A_PART)}
        sync = self.run.sync
        lasting |= {"steps": self.run.train.steps, "wire": sync.wire, "local_steps": sync.local_steps}
        return _digits(lasting)


def dealt_out(shapes: Mapping[str, tuple[int, ...]], servers: int) -> list[Flat]:
    """Deal parameters out over servers, whole ones, so that any update rule can be a server's: the largest first, each
    to the server that has least (Graham's rule: no more than 4/3 of the least possible maximum).
    """
    parts: list[dict[str, tuple[int, ...]]] = [{} for _ in range(servers)]
    held = [0] * servers
    for name in sorted(shapes, key=lambda name: (-prod(shapes[name]), name)):
        least = held.index(min(held))
        parts[least][name] = shapes[name]
        held[least] += prod(shapes[name])
    return [Flat({name: shape for name, shape in shapes.items() if name in part}) for part in parts]


def is_server(run: RunConfig) -> bool:
    return bool(run.sites) and server_number(run.site) is not None


def _digits(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def site_folder(run_dir: Path, site: str) -> Path:
    """Return the folder of a site in that of the whole run; `run_dir` itself if it is that already, or for no site."""
    own = Path(SITES) / site
    return run_dir if not site or run_dir.parts[-2:] == own.parts else run_dir / own


def group_folder(run_dir: Path) -> Path:
    """Return the folder of the whole run, for that of one of its sites: runs/NAME for runs/NAME/sites/SITE."""
    return run_dir.parent.parent


def home_of(run_dir: Path) -> Path:
    """Return the folder that holds a run's secret: that of the whole run for the folder of a site."""
    return group_folder(run_dir) if run_dir.parent.name == SITES else run_dir


def kept_in(folder: Path) -> Path:
    """Return the folder where it is written down what became of the part of a run that was launched in `folder`.

    That is `folder` itself, but for a parameter server, whose state is that of the whole run.
    """
    is_servers = folder.parent.name == SITES and server_number(folder.name) is not None
    return group_folder(folder) if is_servers else folder


def at_site(run: RunConfig) -> RunConfig:
    """Return the run with the batch of each site filled in, and its own site's batch and plan as the run's.

    A plan that does not say how sites agree has the run's word, or the usual one.

    What it returns stays as it is if this is called again. Raises: ValueError if the batch cannot be dealt out.
    """
    if all(site.batch for site in run.sites):
        own = next((site.batch for site in run.sites if site.name == run.site), 0)
        if run.site and run.train.global_batch == own:
            return run
    batches = batches_of(run.sites, run.train.global_batch)
    sites = tuple(site.model_copy(update={"batch": batch}) for site, batch in zip(run.sites, batches, strict=True))
    update: dict[str, object] = {"sites": sites}
    if run.site:
        own_site = sites[[site.name for site in sites].index(run.site)]
        update["train"] = {"global_batch": own_site.batch}
        way = way_of_sites(run.plan)
        plan = with_sync(own_site.plan or run.plan, way)
        update["plan"] = plan if "sync" in words_of(plan) else f"{plan},sync={way}"
        if own_site.processes:
            update["launch"] = {"processes": own_site.processes}
    return run.with_keys(**update)
