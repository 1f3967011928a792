"""Scores of a trained model on tasks of lm-eval, under any plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from argosy.inference.plans import plan_to_score
from argosy.inference.rank_model import RankModel, model_to_score
from argosy.inference.sampling import Sampling
from argosy.inference.trained_model import SomeModel
from argosy.inference.writing import TextWriter
from argosy.parallel.world import World
from argosy.plan.plan import Plan
from argosy.training.rows import TaskScores, WriteRequest
from argosy.training.tasks import TaskScorer


@dataclass(frozen=True)
class TaskRequest:
    """The tasks that are scored; see `TaskScorer`."""

    names: list[str]
    fewshot: int | None
    limit: int
    seq_len: int
    trusts_code: bool
    kind: ClassVar[Any] = TaskScores

    def score(self, source: SomeModel, plan: Plan, world: World) -> TaskScores:
        """Return the scores under `plan`; all ranks call it, and get the same.

        Raises: UserError if the plan cannot lay out the model, or a task cannot be scored.
        """
        scorer = TaskScorer(
            self.names,
            source.tokenizer,
            model_to_score(source, plan, world, self.seq_len),
            plan_to_score(plan, self.seq_len).microbatch,
            self.seq_len,
            world,
            fewshot=self.fewshot,
            limit=self.limit,
            trusts_code=self.trusts_code,
            write=_Writer(source, plan, world),
        )
        return scorer.score(lambda number, batches: None)


class _Writer:
    """Has a model write texts. It is laid out anew for that, once a task asks for it: rows are computed in another way
    than tokens one by one."""

    def __init__(self, source: SomeModel, plan: Plan, world: World):
        self._about = source, plan, world
        self._writer: TextWriter | None = None

    def __call__(self, texts: Sequence[WriteRequest]) -> list[str]:
        """Return the texts; of a prompt that leaves no room in the context the beginning is left out."""
        if self._writer is None:
            model = RankModel(*self._about)
            self._writer = TextWriter(self._about[0], lambda request: model.sample(request, lambda: False))
        alike: dict[Sampling, list[int]] = {}
        for number, text in enumerate(texts):
            sampling = Sampling(text.max_tokens, text.temperature, text.top_p, stop=tuple(filter(None, text.stop)))
            alike.setdefault(sampling, []).append(number)
        found = [""] * len(texts)
        for sampling, numbers in alike.items():
            prompts = [self._tokens(texts[number].prompt, sampling.max_tokens) for number in numbers]
            for number, completion in zip(numbers, self._writer.complete(prompts, sampling), strict=True):
                found[number] = completion.text
        return found

    def _tokens(self, prompt: str, new: int) -> list[int]:
        assert self._writer is not None
        tokenizer = self._writer.tokenizer
        tokens = [*tokenizer.begin_ids, *tokenizer.encode(prompt)] or [tokenizer.eod_id]
        return tokens[-max(1, self._writer.config.max_seq_len - new) :]
