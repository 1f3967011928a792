"""lm-eval's harness over a model of ours."""

from __future__ import annotations

import difflib
import io
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, redirect_stderr
from pathlib import Path
from typing import Any

import numpy as np

from argosy.data.tokenizer import Tokenizer
from argosy.errors import UserError, missing_extra
from argosy.training.rows import Request, TaskScores, WriteRequest

try:
    import lm_eval
    from lm_eval import utils
    from lm_eval.api.model import TemplateLM
    from lm_eval.tasks import TaskManager
except ImportError:
    raise missing_extra("lm-eval", "scores", "scoring tasks") from None

MOST_NEW_TOKENS = 256
"""Tokens of a text of which a task does not say how long it may be, as lm-eval has it."""
FAMILIAR = ("arc_easy", "hellaswag", "mmlu")
"""Tasks that the error for an unknown task names."""
BOOTSTRAPS = 100
"""Resamplings for the standard error of metrics that have no formula for it."""


class Harness(TemplateLM):  # type: ignore[misc]
    """Tasks, and our model as lm-eval sees one.

    Args:
        names, fewshot, limit, trusts_code: as of `training.tasks.TaskScorer`.
        seq_len: the longest request, in tokens.
        score: returns the log-probability of each continuation, and True if all its tokens are the likeliest.
        write: returns the texts that the model writes.

    Raises: UserError if a task is unknown, or its data cannot be had.
    """

    def __init__(
        self,
        names: Sequence[str],
        fewshot: int | None,
        limit: int,
        trusts_code: bool,
        tokenizer: Tokenizer,
        seq_len: int,
        score: Callable[[Sequence[Request]], list[tuple[float, bool]]],
        write: Callable[[Sequence[WriteRequest]], list[str]] | None,
    ):
        super().__init__()
        with _without_bars():
            self._tasks = _load(names, fewshot, trusts_code, may_write=write is not None)
        self._limit = limit or None
        self._tokenizer, self._seq_len = tokenizer, seq_len
        self._score, self._write = score, write

    def evaluate(self) -> TaskScores:
        """Return the scores of the model as it is."""
        how: dict[str, Any] = {"bootstrap_iters": BOOTSTRAPS, "log_samples": False}
        with _without_bars():
            found = lm_eval.evaluate(self, self._tasks, limit=self._limit, **how)
        return {name: _values(result) for name, result in found["results"].items()}

    @property
    def eot_token_id(self) -> int:
        """The token between documents."""
        return self._tokenizer.eod_id

    @property
    def prefix_token_id(self) -> int:
        """The token that stands for an empty context."""
        return [self._tokenizer.eod_id, *self._tokenizer.begin_ids][-1]

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return the tokens of a text; of one that begins (None), with what the tokenizer puts before it."""
        begin = self._tokenizer.begin_ids if add_special_tokens in (None, True) else []
        return [*begin, *self._tokenizer.encode(string)]

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        return self._score([self._with_an_answer(*request) for request in requests])

    def _with_an_answer(self, texts: tuple[str, str] | None, context: list[int], answer: list[int]) -> Request:
        """Return a request. If the continuation is no token of its own, score that which the context's end has with it.

        lm-eval cuts the tokens of both where those of the context end.
        """
        if answer or texts is None:
            return context, answer
        whole = self.tok_encode("".join(texts))
        whole = [self.prefix_token_id] * max(0, 2 - len(whole)) + whole
        return whole[:-1], whole[-1:]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-probability of each whole text, in windows."""
        windows: list[tuple[Any, list[int], list[int]]] = []
        counts = []
        for (text,) in (request.args for request in requests):
            parts = utils.get_rolling_token_windows(
                self.tok_encode(text), self.prefix_token_id, max_seq_len=self._seq_len - 1, context_len=1
            )
            some = [(None, *utils.make_disjoint_window(part)) for part in parts]
            windows += some
            counts.append(len(some))
        values = [value for value, _ in self._loglikelihood_tokens(windows)]
        return [float(sum(part)) for part in np.split(values, np.cumsum(counts)[:-1])]

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Return what the model writes after each prompt."""
        assert self._write is not None, "tasks that write are refused when they are loaded"
        return self._write([_asked(*request.args) for request in requests])


def _without_bars() -> AbstractContextManager[Any]:
    """Keep the harness' bars off the terminal, where our own progress is."""
    return redirect_stderr(io.StringIO())


def _load(names: Sequence[str], fewshot: int | None, trusts_code: bool, may_write: bool) -> Any:
    """Return lm-eval's tasks of these names. Raises: UserError."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    files = [name for name in names if name.endswith((".yaml", ".yml"))]
    for file in files:
        _check_file(Path(file), trusts_code)
    manager = TaskManager(include_defaults=len(files) < len(names))
    for name in set(names) - set(files):
        if not manager.match_tasks([name]):
            near = difflib.get_close_matches(name, manager.all_tasks, 3)
            hint = f"Did you mean {' or '.join(near)}?" if near else "Or name a task file (*.yaml)."
            raise UserError(
                f"the task {name!r} is not known to lm-eval {lm_eval.__version__}, which knows "
                f"{len(manager.all_tasks):,}, such as {', '.join(FAMILIAR)}. {hint}"
            )
    try:
        found = manager.load(list(names))
    except Exception as problem:  # whatever a task file or a data set's host may do
        raise UserError(
            f"tasks {', '.join(names)}: {_first_line(problem)}. Check the task's file, and that its data are here or "
            "can be downloaded."
        ) from problem
    for name, task in found["tasks"].items():
        if task.OUTPUT_TYPE == "generate_until" and not may_write:
            raise UserError(
                f"the task {name} has the model write texts, which is not done while it trains. Score it afterwards: "
                f"argosy evaluate RUN --tasks {name}"
            )
        if fewshot is not None or task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=fewshot or 0)
        task.set_fewshot_seed(0)
    return found


def _check_file(file: Path, trusts_code: bool) -> None:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise UserError(f"{file}: the task file cannot be read ({problem}). Name a file that is there.") from None
    if "!function" in text and not trusts_code:
        raise UserError(
            f"{file}: the task brings code of its own (!function), which would be run. Read it, and if you trust it, "
            "give --trust-code to argosy evaluate."
        )


def _asked(prompt: str, settings: dict[str, Any]) -> WriteRequest:
    """Return what lm-eval asks for: without `do_sample`, the likeliest token each time."""
    until = settings.get("until") or []
    temperature = float(settings.get("temperature") or 0.0) if settings.get("do_sample") else 0.0
    return WriteRequest(
        prompt,
        [until] if isinstance(until, str) else list(until),
        int(settings.get("max_gen_toks") or MOST_NEW_TOKENS),
        temperature,
        float(settings.get("top_p") or 1.0),
    )


def _first_line(problem: Exception) -> str:
    return f"{type(problem).__name__}: {str(problem).partition(chr(10))[0]}".strip(": ")


def _values(result: dict[str, Any]) -> dict[str, float]:
    """Return the metrics of one of lm-eval's results, whose keys are METRIC,FILTER."""
    found = {}
    for key, value in result.items():
        metric, comma, kind = key.partition(",")
        if comma and isinstance(value, int | float):
            found[metric if kind == "none" else f"{metric}/{kind}"] = float(value)
    return found
