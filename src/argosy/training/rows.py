"""Scores of the answers in rows, under any plan: of requests, laid out in rows, and of the answers that an objective
compares with.

Preferences compare with the log-probabilities of answers before training (`References`), which are computed once and
kept with the run. The starting weights score all rows before the first step, so no second model is in memory
afterwards. A run that goes on reads the file; what is in it does not depend on the layout but for rounding.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import torch

from argosy.data.loader import OpenData
from argosy.data.order import Samples
from argosy.data.packing import START_BIT, TRAINED, Words, sequences_in
from argosy.data.shards import BadShard, Place, TokenSource
from argosy.errors import RunFailed
from argosy.files import atomic_write
from argosy.models.microbatch import compared_microbatches
from argosy.observe.heartbeat import Heartbeat
from argosy.observe.screen import Progress
from argosy.parallel.model import ParallelModel
from argosy.parallel.world import World, node_of_each_rank

Request = tuple[list[int], list[int]]
"""Tokens of a context, at least one, and of its continuation, whose log-probability is asked for."""


REFERENCES = "reference-*.npz"
"""Files of a run's folder with what is known of the rows before training; the star: the data's identity."""


@dataclass(frozen=True)
class WriteRequest:
    """A text that a task has the model write."""

    prompt: str
    stop: list[str]
    max_tokens: int
    temperature: float
    """0: the likeliest token each time."""
    top_p: float


TaskScores = dict[str, dict[str, float]]
"""Task -> metric -> value. A metric that lm-eval computes after a filter is called METRIC/FILTER."""


def scores_of_rows(
    model: ParallelModel,
    rows: int,
    read: Callable[[np.ndarray], np.ndarray],
    microbatch: int,
    world: World,
    before_batch: Callable[[int, int], None],
    is_judged: bool,
) -> np.ndarray:
    """Return the log-probability of each answer, and how many of its tokens are not the likeliest, fp32 [rows, most
    answers of a row, 2]. All ranks call it together, and get the same.

    read: returns the rows of these numbers, int32 [n, T+1]. before_batch(i, n) is called before the i-th of n batches;
    what it raises, it raises on all ranks alike. is_judged: as of `compared_microbatches`.
    """
    mine = np.arange(model.dp_rank, rows, model.dp)
    size = microbatch * model.microbatches_at_once
    batches = -(-rows // (model.dp * size))
    found: list[tuple[int, np.ndarray]] = []
    for number in range(batches):
        before_batch(number + 1, batches)
        some = mine[number * size : (number + 1) * size]
        batch = read(np.concatenate([some, np.zeros(size - len(some), np.int64)]))
        scored = model.score_batch(compared_microbatches(batch, microbatch, world.device, is_judged))
        if scored is not None:
            scores, kinds = torch.cat(scored).cpu().numpy(), sequences_in(batch).kinds
            found += [(int(row), scores[i, np.flatnonzero(kinds[i])]) for i, row in enumerate(some)]
    most = max(world.gather(max((len(scores) for _, scores in found), default=1), int))
    table = np.zeros((rows, most, 2), np.float32)
    for row, scores in found:
        table[row, : len(scores)] = scores
    return world.sum_array(table)


def request_rows(requests: Sequence[Request], seq_len: int, filler: int) -> tuple[Words, list[tuple[int, int]]]:
    """Return rows of requests, int32 [n, seq_len + 1], and the row of each request and its place among those there.

    A request is a sequence of its own, whose continuation is learned (`data.packing`); of one that is longer than a
    row, the end is taken.
    """
    units = [_unit(context, continuation)[-seq_len:] for context, continuation in requests]
    places: list[tuple[int, int]] = [(0, 0)] * len(units)
    rows, room, count = list[Words](), 0, 0
    for number in sorted(range(len(units)), key=lambda number: -len(units[number])):
        unit = units[number]
        if len(unit) > room:
            rows.append(np.full(seq_len + 1, filler, np.int32))
            room, count = seq_len, 0
        rows[-1][seq_len - room : seq_len - room + len(unit)] = unit
        rows[-1][seq_len - room] |= START_BIT
        places[number] = len(rows) - 1, count
        room, count = room - len(unit), count + 1
        rows[-1][seq_len - room] |= START_BIT  # of what is next, or of the filler
    return np.stack(rows), places


def _unit(context: list[int], continuation: list[int]) -> Words:
    unit = np.array([*context, *continuation], np.int32)
    unit[len(context) :] |= TRAINED
    return unit


Table = np.ndarray
"""A table of one source: fp32 [windows, most answers of a row]."""


class References:
    """The tables of all sources of a run."""

    def __init__(self, tables: Sequence[Table], unread: Iterable[Place] = ()):
        self.tables, self.unread = tables, list(unread)
        """Shards that could not be read when the rows were scored: theirs are compared with nothing."""

    def of(self, samples: Samples) -> np.ndarray:
        """Return the log-probabilities of the answers of these samples, fp32 [samples, most answers]."""
        most = max(table.shape[1] for table in self.tables)
        found = np.zeros((len(samples), most), np.float32)
        for number, table in enumerate(self.tables):
            here = np.flatnonzero(samples.sources == number)
            found[here, : table.shape[1]] = table[samples.windows[here]]
        return found


class ReferenceScorer:
    """Computes the tables of a run, or reads those that it has computed. All ranks call it together."""

    def __init__(
        self,
        model: ParallelModel,
        data: OpenData,
        world: World,
        run_dir: Path,
        microbatch: int,
        is_judged: bool,
        skips_bad_shards: bool,
        heartbeat: Heartbeat,
        progress: Progress,
    ):
        self._model, self._data, self._world = model, data, world
        self._microbatch, self._is_judged, self._skips_bad_shards = microbatch, is_judged, skips_bad_shards
        self._heartbeat, self._progress = heartbeat, progress
        self.path = run_dir / REFERENCES.replace("*", data.identity)

    def references(self, steps_done: int) -> References:
        """Return what is known, or score all rows with the weights as they are.

        Raises: RunFailed if no rank can read the file, and the weights are not those of the start any more; BadShard.
        """
        mine = self._kept()
        holders = self._world.gather(mine is not None, bool)
        if any(holders):
            return self._shared(mine, holders.index(True))
        if steps_done:
            raise RunFailed(
                f"{self.path} is gone, or damaged: the log-probabilities of the model before training. Restore the "
                "file, or begin a new run from the weights that this one began with."
            )
        unread: set[Place] = set()
        found = References([self._scored(source, unread) for source in self._data.sources])
        found.unread = sorted({place for some in self._world.gather(list(unread), list[Place]) for place in some})
        nodes = node_of_each_rank(self._world)
        is_first_on_node = nodes.index(nodes[self._world.rank]) == self._world.rank
        for writes in (self._world.is_first, is_first_on_node):  # then other machines, if they do not see it
            if writes and self._kept() is None:
                with atomic_write(self.path) as file:
                    np.savez(file, *found.tables, unread=np.array(json.dumps(found.unread)))
            self._world.barrier()
        return found

    def _kept(self) -> References | None:
        """Return what is in this rank's folder; None if it has nothing that can be read."""
        try:
            with np.load(self.path, allow_pickle=False) as file:
                tables = [file[f"arr_{number}"] for number in range(len(self._data.sources))]
                unread = json.loads(str(file["unread"])) if "unread" in file else []
                return References(tables, [(str(folder), int(shard)) for folder, shard in unread])
        except (OSError, ValueError, TypeError, KeyError, EOFError, BadZipFile):
            return None

    def _shared(self, mine: References | None, holder: int) -> References:
        """Return what rank `holder` has. `mine` is what this rank has."""
        tables, unread = ([], []) if mine is None else (mine.tables, mine.unread)
        shapes = self._world.gather([list(table.shape) for table in tables], list[list[int]])[holder]
        held = tables if tables and self._world.rank == holder else [np.zeros(s, np.float32) for s in shapes]
        shared = [self._world.sum_array(table) for table in held]
        return References(shared, self._world.gather(unread, list[Place])[holder])

    def _scored(self, source: TokenSource, unread: set[Place]) -> Table:
        """Return the table of a source; shards of it that this rank cannot read are added to `unread`."""
        seq_len = self._data.seq_len
        windows = source.windows(seq_len)

        def read(chosen: np.ndarray) -> np.ndarray:
            rows = np.full((len(chosen), seq_len + 1), self._data.filler, np.int32)
            while True:
                bad = [shard for folder, shard in unread if folder == source.name]
                sound = np.flatnonzero(~source.in_shards(chosen, seq_len, bad))
                part = np.empty((len(sound), seq_len + 1), np.int32)
                try:
                    source.read_windows(chosen[sound], part)
                except BadShard as problem:
                    if not self._skips_bad_shards:
                        raise
                    unread.add(problem.place)
                    continue
                rows[sound] = part
                return rows

        def before_batch(number: int, batches: int) -> None:
            self._heartbeat.advance()
            self._progress.doing(f"scoring answers before training, batch {number} of {batches}")

        how = (self._microbatch, self._world, before_batch)
        return scores_of_rows(self._model, windows, read, *how, is_judged=self._is_judged)[..., 0].copy()
