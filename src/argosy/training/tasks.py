"""Tasks of the evaluation harness (lm-eval), scored with the model of a run under its plan.

The first rank runs the harness. What it asks to score becomes rows of many short sequences that do not attend to each
other, which all ranks score together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np

from argosy.data.packing import Words
from argosy.data.tokenizer import Tokenizer
from argosy.parallel.model import ParallelModel
from argosy.parallel.world import World
from argosy.training.rows import Request, TaskScores, WriteRequest, request_rows, scores_of_rows

if TYPE_CHECKING:  # the first rank imports it when it is needed: it takes seconds
    from argosy.training.harness import Harness

T = TypeVar("T")
Writer = Callable[[Sequence[WriteRequest]], list[str]]
"""Has the model write texts. All ranks call it alike; what it returns on the first one counts."""


class _Work(NamedTuple):
    """The next work of all ranks: rows to score, or texts to write; none: there is nothing more."""

    rows: int = 0
    texts: list[WriteRequest] = []


class TaskScorer:
    """Scores tasks with a model. All ranks make one and call it together.

    Args:
        names: tasks and groups that lm-eval knows, and files of tasks (*.yaml).
        fewshot: examples before each question; None: as the task says.
        limit: documents of each task; 0: all.
        model, microbatch: the model under its plan, and rows of a microbatch.
        seq_len: tokens of a row. A longer request loses its beginning.
        trusts_code: True if task files may bring code of their own (`!function`).
        write: has the model write texts; None: tasks that need it are refused.

    Raises: UserError, on all ranks, if a task is unknown, or its data cannot be had.
    """

    def __init__(
        self,
        names: Sequence[str],
        tokenizer: Tokenizer,
        model: ParallelModel,
        microbatch: int,
        seq_len: int,
        world: World,
        *,
        fewshot: int | None = None,
        limit: int = 0,
        trusts_code: bool = False,
        write: Writer | None = None,
    ):
        self._model, self._microbatch, self._seq_len, self._world = model, microbatch, seq_len, world
        self._filler, self._write = tokenizer.eod_id, write
        self._before_batch: Callable[[int, int], None] = lambda number, batches: None
        self._was_interrupted = False
        self._harness: Harness | None = None

        def load() -> bool:
            from argosy.training.harness import Harness

            about = (names, fewshot, limit, trusts_code)
            texts = None if write is None else self._write_texts
            self._harness = Harness(*about, tokenizer, seq_len, self._score_requests, texts)
            return True

        world.share_first(load, bool)

    def score(self, before_batch: Callable[[int, int], None]) -> TaskScores:
        """Return the scores, the same on all ranks.

        before_batch(i, n) is called before the i-th of n batches; what it raises, it raises on all ranks alike.
        """
        self._before_batch, self._was_interrupted = before_batch, False
        if self._harness is None:
            while (work := self._world.share_first(_Work, _Work)) != _Work():
                if work.rows:
                    self._score_rows(np.zeros((work.rows, self._seq_len + 1), np.int32))
                elif self._write is not None:
                    self._write(work.texts)
            return self._world.share_first(dict, TaskScores)
        found, problem = TaskScores(), None
        try:
            found = self._harness.evaluate()
        except Exception as raised:
            if self._was_interrupted:
                raise
            problem = raised
        self._world.share_first(_Work, _Work)
        return self._world.share_first(lambda: _given(found, problem), TaskScores)

    def _score_requests(self, requests: Sequence[Request]) -> list[tuple[float, bool]]:
        """Return the log-probability of each continuation, and True if each of its tokens is the likeliest."""
        rows, places = request_rows(requests, self._seq_len, self._filler)
        scores = self._together(_Work(rows=len(rows)), lambda: self._score_rows(rows))
        return [(float(scores[place][0]), not scores[place][1]) for place in places]

    def _write_texts(self, texts: Sequence[WriteRequest]) -> list[str]:
        assert self._write is not None
        write = partial(self._write, texts)
        return self._together(_Work(texts=list(texts)), write)

    def _together(self, work: _Work, compute: Callable[[], T]) -> T:
        """Have all ranks do some work, of which the first one needs the result."""
        self._world.share_first(lambda: work, _Work)
        try:
            return compute()
        except BaseException:
            self._was_interrupted = True  # the other ranks too
            raise

    def _score_rows(self, rows: Words) -> np.ndarray:
        """Return `scores_of_rows` of rows int32 [n, T+1], which are the sum of what the ranks give."""
        rows = self._world.sum_array(rows)
        about = (self._microbatch, self._world, self._before_batch)
        return scores_of_rows(self._model, len(rows), rows.__getitem__, *about, is_judged=True)


def _given(found: TaskScores, problem: Exception | None) -> TaskScores:
    if problem is not None:
        raise problem
    return found
