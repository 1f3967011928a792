"""Loss on held-out text, of the model and of the simplest baseline on the same tokens; and scores of tasks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from argosy.config.schema import RunConfig
from argosy.config.train import PreferenceConfig
from argosy.data.manifest import TOKENIZER
from argosy.data.packing import (
    CHOSEN_SIDE,
    IGNORED,
    REJECTED_SIDE,
    Words,
    is_packed,
    sequences_in,
    unpack,
    without_rejected,
)
from argosy.data.shards import BadShard, Place, TokenSource, spread_windows
from argosy.data.tokenizer import Tokenizer
from argosy.errors import UserError
from argosy.models.microbatch import compared_microbatches, microbatches
from argosy.models.preference import Preference, Sequences
from argosy.observe.heartbeat import Heartbeat
from argosy.observe.screen import Progress
from argosy.parallel.model import ParallelModel
from argosy.parallel.world import World
from argosy.plan.plan import Plan
from argosy.training.rows import TaskScores
from argosy.training.tasks import TaskScorer

BASELINE_TOKENS = 20_000_000
"""Training tokens of each source that the unigram baseline counts."""
BASELINE_CHUNK = 1_000_000
"""Tokens that are read at once: some blocks of 256 KiB, which a store sends together."""


@dataclass(frozen=True)
class HeldOut:
    """Windows of held-out text from all sources, and the length of the text that they stand for."""

    windows: np.ndarray
    """int32 [n, seq_len + 1]; window i predicts tokens 1..seq_len."""
    text_bytes: float
    """UTF-8 bytes of the predicted tokens (the sources' average bytes per token times their number)."""
    end_of_document: int
    are_scored: bool = False
    """True for pairs whose sides a reward model scores."""

    @cached_property
    def tokens(self) -> int:
        """Predicted tokens; of conversations, those of answers."""
        return len(self.targets)

    @cached_property
    def pairs(self) -> int:
        """Pairs whose sides are scored."""
        return int((sequences_in(self.windows).kinds == CHOSEN_SIDE).sum()) if self.are_scored else 0

    @property
    def targets(self) -> np.ndarray:
        """The predicted tokens, one after the other."""
        of_chats = np.array([is_packed(self.windows[i : i + 1]) for i in range(len(self.windows))], bool)
        of_rows = unpack(self.windows[of_chats]).targets
        return np.concatenate([self.windows[~of_chats, 1:].ravel(), of_rows[of_rows != IGNORED]])

    @classmethod
    def read(
        cls,
        splits: Sequence[TokenSource],
        seq_len: int,
        max_tokens: int,
        are_scored: bool = False,
        without: Collection[Place] = (),
    ) -> HeldOut:
        """Read an equal share of at most `max_tokens` from each split, always the same windows.

        are_scored: a reward model compares their pairs. without: shards that are left out. Splits of less text than a
        window are left out too, and without any text the result is empty. Raises: UserError if there is text, but no
        split has a window; BadShard.
        """
        splits = _long_enough(splits, seq_len)
        bad = [[shard for folder, shard in without if folder == split.name] for split in splits]
        share = max_tokens // max(1, len(splits))
        parts = [spread_windows(split, seq_len, share, shards) for split, shards in zip(splits, bad, strict=True)]
        if not parts:
            return cls(np.empty((0, seq_len + 1), np.int32), 0.0, 0)
        sizes = [
            part.shape[0] * seq_len * split.text_bytes_per_token for part, split in zip(parts, splits, strict=True)
        ]
        # Of pairs and judged answers, the better ones are scored: one number, whatever the objective makes of them.
        for number, split in enumerate(splits):
            if not are_scored and split.manifest.rows is not None and split.manifest.rows.kind != "conversations":
                sizes[number] *= _chosen_share(parts[number])
                parts[number] = without_rejected(parts[number])
        return cls(np.concatenate(parts), sum(sizes), splits[0].manifest.eod_id, are_scored)


def _long_enough(splits: Sequence[TokenSource], seq_len: int) -> list[TokenSource]:
    """Return the splits that have a window; if none has one, those that have text."""
    some = [split for split in splits if len(split)]
    return [split for split in some if split.manifest.rows is not None or len(split) > seq_len] or some


def _chosen_share(rows: Words) -> float:
    """Return the share of the answers' tokens that are those of chosen or desirable ones."""
    found = sequences_in(rows)
    chosen, rejected = (float(found.lengths[found.kinds == side].sum()) for side in (CHOSEN_SIDE, REJECTED_SIDE))
    return chosen / max(1.0, chosen + rejected)


@dataclass(frozen=True)
class Score:
    """The score of a model on held-out text; of a reward model, on pairs."""

    loss: float
    """Nats per token, or per pair."""
    perplexity: float | None
    """None of pairs, as the next."""
    bits_per_byte: float | None
    """Bits per UTF-8 byte: comparable between tokenizers."""
    tokens: int
    accuracy: float | None = None
    """Share of pairs whose chosen side has the higher score; None of text."""

    @classmethod
    def of(cls, total_nats: float, held_out: HeldOut) -> Score:
        """Return the score of a model that spends `total_nats` on `held_out`."""
        loss = total_nats / held_out.tokens
        perplexity = math.exp(loss) if loss < 700 else math.inf
        return cls(loss, perplexity, total_nats / math.log(2) / held_out.text_bytes, held_out.tokens)

    def line(self) -> dict[str, float]:
        """Return what metrics.jsonl has of it."""
        found = {
            "validation_loss": self.loss,
            "bits_per_byte": self.bits_per_byte,
            "validation_accuracy": self.accuracy,
        }
        return {name: value for name, value in found.items() if value is not None}

    def in_words(self) -> str:
        """Return loss and what is told beside it."""
        beside = f"{self.bits_per_byte:.3f} bits per byte" if self.accuracy is None else f"{self.accuracy:.1%} of pairs"
        return f"loss {self.loss:.3f}, {beside}"


class Evaluator:
    """Scores a run's model on held-out text every evaluate.every_steps, and after the last step."""

    def __init__(
        self,
        run: RunConfig,
        plan: Plan,
        sources: Sequence[TokenSource],
        model: ParallelModel,
        world: World,
        heartbeat: Heartbeat,
        progress: Progress,
    ):
        """Raises: UserError if sources have held-out text, but none has a window."""
        self._every, self._microbatch = run.evaluate.every_steps, plan.microbatch
        self._model, self._world, self._heartbeat, self._progress = model, world, heartbeat, progress
        splits = [source.held_out() for source in sources]
        kept = _long_enough(splits, run.data.seq_len)
        for split in (split for split in splits if len(split) and split not in kept):
            few = f"{len(split)} tokens are held out, fewer than a sample has"
            progress.say(f" evaluations leave out {split.name}: {few}", "yellow")
        self.held_out = self._read(splits, run)
        self.score: Score | None = None
        """The newest; None before the first, and without held-out text."""
        self.task_scores: TaskScores = {}
        """The scores of tasks, of the same model as `score`."""
        self._tasks: TaskScorer | None = None
        if run.evaluate.tasks:
            evaluate, tokenizer = run.evaluate, Tokenizer.load(sources[0].folder / TOKENIZER)
            about = (evaluate.tasks, tokenizer, model, plan.microbatch, run.data.seq_len, world)
            self._tasks = TaskScorer(*about, fewshot=evaluate.task_fewshot, limit=evaluate.task_limit)
            if not self.held_out.tokens:
                raise UserError(
                    f"evaluate.tasks = {list(evaluate.tasks)}: they are scored with held-out text, of which there is "
                    "none. Prepare the data with a validation fraction above 0."
                )

    def _read(self, splits: Sequence[TokenSource], run: RunConfig) -> HeldOut:
        """Return the held-out text, without shards that any rank cannot read if data.on_bad_shard = "skip"."""
        bad = set[Place]()
        while True:
            found, mine = None, list[Place]()
            try:
                found = HeldOut.read(splits, run.data.seq_len, run.evaluate.tokens, run.model.score, bad)
            except BadShard as problem:
                if run.data.on_bad_shard != "skip":
                    raise
                mine = [problem.place]
                self._progress.say(f" evaluations leave out what cannot be read: {problem}", "yellow")
            more = {place for some in self._world.gather(mine, list[Place]) for place in some}
            if found is not None and not more:
                return found
            bad |= more

    @property
    def batches(self) -> int:
        return -(-len(self.held_out.windows) // (self._microbatch * self._model.microbatches_at_once * self._model.dp))

    def is_due(self, done: int) -> bool:
        """True if evaluate.every_steps asks for a score after `done` steps."""
        return bool(self._every) and done % self._every == 0

    def evaluate(self, check: Callable[[], None]) -> None:
        """Score the model as it is, if there is held-out text. All processes call it together.

        `check` is called before each batch. Raises: what it does; the score is then the one before.
        """
        if not self.held_out.tokens:
            return
        batches = itertools.count(1)

        def before_batch() -> None:
            self._heartbeat.advance()
            self._progress.doing(f"evaluating, batch {next(batches)} of {self.batches}")
            check()

        score = evaluate(self._model, self.held_out, self._microbatch, self._world, before_batch)
        if self._tasks is not None:

            def before_task_batch(number: int, batches: int) -> None:
                self._heartbeat.advance()
                self._progress.doing(f"scoring tasks, batch {number} of {batches}")
                check()

            self.task_scores = self._tasks.score(before_task_batch)
        self.score = score


@torch.no_grad()
def evaluate(
    model: ParallelModel,
    held_out: HeldOut,
    microbatch: int,
    world: World,
    before_batch: Callable[[], None] = lambda: None,
) -> Score:
    """Return the model's score; every data-parallel rank takes a share, and all processes get the result.

    `before_batch` is called before each batch; what it raises, it raises on all processes alike.

    All run the same number of equal batches (short ones are filled with targets that do not count), so that
    collectives inside the model match and nothing is compiled anew. They are filled with text like the rest: if one
    token were repeated, each could be a document of its own, and attention slow.
    """
    if held_out.are_scored:
        return _score_of_pairs(model, held_out, microbatch, world, before_batch)
    total = torch.zeros((), dtype=torch.float64, device=world.device)
    for filled, rows in _batches(model, held_out, microbatch):
        before_batch()
        micros = microbatches(filled, microbatch, held_out.end_of_document, world.device)
        for first, micro in zip(range(0, len(filled), microbatch), micros, strict=True):
            micro.targets_BT[max(0, rows - first) :] = IGNORED
        total += model.loss(micros)
    return Score.of(world.sum(total).item(), held_out)


def _batches(model: ParallelModel, held_out: HeldOut, microbatch: int) -> Iterator[tuple[npt.NDArray[np.int32], int]]:
    """Yield the rows of this rank's batches, the last ones filled up with a row that is there, and how many count."""
    windows, batch = held_out.windows, microbatch * model.microbatches_at_once
    stride = batch * model.dp
    for start in range(model.dp_rank * batch, -(-len(windows) // stride) * stride, stride):
        rows = windows[start : start + batch]
        yield np.concatenate([rows, windows[:1].repeat(batch - len(rows), axis=0)]), len(rows)


def _score_of_pairs(
    model: ParallelModel, held_out: HeldOut, microbatch: int, world: World, before_batch: Callable[[], None]
) -> Score:
    """Return how well a reward model tells the sides of pairs apart, as `evaluate`."""
    preference = Preference("reward", PreferenceConfig())
    total = torch.zeros(2, dtype=torch.float64, device=world.device)
    for filled, rows in _batches(model, held_out, microbatch):
        before_batch()
        micros = compared_microbatches(filled, microbatch, world.device, is_judged=False)
        for number, scores_BT2 in enumerate(model.score_batch(micros) or ()):
            of, count = micros[number].sequences, max(0, rows - number * microbatch)
            assert of is not None
            total += preference.compared(scores_BT2[:count, :, 0], Sequences(*(part[:count] for part in of)))
    loss, right = world.sum(total).tolist()
    pairs = max(1, held_out.pairs)
    return Score(loss / pairs, None, None, held_out.tokens, right / pairs)


def unigram_score(sources: Sequence[TokenSource], held_out: HeldOut, vocab_size: int) -> Score:
    """Return the score of a model that knows only how often each token occurs in the training text (add-one)."""
    counts = np.ones(vocab_size)
    for source in sources:
        seq_len = 1 if source.manifest.rows is None else source.manifest.rows.seq_len
        chunk = max(1, BASELINE_CHUNK // seq_len) * seq_len
        for start in range(0, min(len(source), BASELINE_TOKENS), chunk):
            with suppress(BadShard):  # a baseline that lacks a part of the text is still one
                tokens = source.tokens(start, start + chunk)
                if source.manifest.rows is not None:
                    rows = np.pad(tokens.reshape(-1, seq_len), ((0, 0), (0, 1)))  # a word of the next row, unread
                    targets = unpack(without_rejected(rows)).targets
                    tokens = targets[targets != IGNORED]
                counts += np.bincount(tokens, minlength=vocab_size)
    nats = -np.log(counts / counts.sum())
    return Score.of(float(nats[held_out.targets].sum()), held_out)
