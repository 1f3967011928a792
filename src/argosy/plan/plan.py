"""The Plan: how one job is laid out over devices. The planner predicts it, the trainer runs it exactly."""

from __future__ import annotations

import difflib
import tomllib
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, PositiveInt, ValidationError

from argosy.config.schema import RunConfig
from argosy.errors import UserError

Precision = Literal["fp32", "bf16"]

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""The mesh axes, outermost first; their product is the number of processes. `ep` is laid over dp and cp."""
RUNNABLE_AXES = ("dp_replicate",)
"""Axes that this version can train with; a plan that uses another is refused before any process starts."""


class Plan(BaseModel):
    """One layout, complete. As a string: "dp_replicate=2,microbatch=4,precision=bf16" (`str` and `parse`)."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    pp: PositiveInt = 1
    """Pipeline stages."""
    dp_replicate: PositiveInt = 1
    """Data-parallel replicas that hold the whole state."""
    dp_shard: PositiveInt = 1
    """Data-parallel ranks that share one copy of the state."""
    cp: PositiveInt = 1
    """Context-parallel ranks that share a sequence."""
    tp: PositiveInt = 1
    """Tensor-parallel ranks that share each matrix."""
    ep: PositiveInt = 1
    """Expert-parallel ranks, laid over the data and context ranks."""
    microbatch: PositiveInt = 1
    """Sequences that one data-parallel rank runs through the model at once."""
    precision: Precision = "fp32"
    """Arithmetic of the model; weights, gradients' sums and optimizer state stay fp32."""
    compile: bool = True
    """Blocks and loss go through torch.compile."""

    def __str__(self) -> str:
        """The axes that are not 1, and all that `auto` would otherwise choose: it reads back as the same plan."""
        said = self.model_dump(exclude_defaults=True) | self.model_dump(include={"microbatch", "precision"})
        words = [f"{key}={_word(said[key])}" for key in type(self).model_fields if key in said]
        return ",".join(words)

    @classmethod
    def parse(cls, text: str) -> Self:
        """The plan that `text` writes down; axes that it does not name are 1.

        Raises: UserError for an unknown key or a value out of range.
        """
        return cls.from_words(words_of(text))

    @classmethod
    def from_words(cls, words: dict[str, str]) -> Self:
        """The plan of these keys and values, as `words_of` gives them. Raises: UserError."""
        for key in words:
            if key not in cls.model_fields:
                near = difflib.get_close_matches(key, cls.model_fields, n=1)
                hint = f"did you mean {near[0]}?" if near else f"The keys are: {', '.join(cls.model_fields)}."
                raise UserError(f"plan: unknown key {key!r}; {hint}")
        try:
            return cls.model_validate(words)
        except ValidationError as error:
            lines = [f"plan.{e['loc'][0]} = {e['input']}: {e['msg']}" for e in error.errors()]
            raise UserError("\n".join(lines)) from None

    @property
    def world_size(self) -> int:
        """Processes that the plan needs."""
        return self.pp * self.dp * self.cp * self.tp

    @property
    def dp(self) -> int:
        """Data-parallel ranks: each reads other samples."""
        return self.dp_replicate * self.dp_shard

    def accumulation(self, global_batch: int) -> int:
        """Microbatches that each data-parallel rank runs in one step."""
        return global_batch // (self.dp * self.microbatch)

    def check(self, run: RunConfig, processes: int) -> None:
        """Refuse, before any process starts, a plan that cannot train this run. Raises: UserError."""
        for axis in (*AXES, "ep"):
            if getattr(self, axis) > 1 and axis not in RUNNABLE_AXES:
                raise UserError(
                    f"plan.{axis} = {getattr(self, axis)}: this version trains with "
                    f'{", ".join(RUNNABLE_AXES)} only. Try plan = "dp_replicate={processes}".'
                )
        if self.world_size != processes:
            raise UserError(
                f'plan = "{self}" is for {self.world_size} processes, and launch.processes = {processes}. '
                f'Try launch.processes = {self.world_size}, or plan = "auto".'
            )
        rows = self.dp * self.microbatch
        if run.train.global_batch % rows:
            below, above = run.train.global_batch // rows * rows, -(-run.train.global_batch // rows) * rows
            near = " or ".join(str(n) for n in (below, above) if n)
            raise UserError(
                f"train.global_batch = {run.train.global_batch} is not a multiple of {rows} "
                f"({self.dp} data-parallel ranks x plan.microbatch = {self.microbatch}). Try {near}."
            )

    def save(self, path: Path) -> None:
        """Write the plan as TOML, whole or not at all."""
        lines = [f"{key} = {_toml(value)}" for key, value in self.model_dump().items()]
        temporary = path.with_suffix(".tmp")
        temporary.write_text("\n".join(lines) + "\n")
        temporary.replace(path)

    @classmethod
    def load(cls, path: Path) -> Self:
        """The plan that `save` wrote."""
        return cls.model_validate(tomllib.loads(path.read_text()))


def words_of(text: str) -> dict[str, str]:
    """`"auto,precision=fp32"` -> {"auto": "", "precision": "fp32"}.

    Raises: UserError for a word without =, or one that is there twice.
    """
    words: dict[str, str] = {}
    for word in filter(None, (w.strip() for w in text.split(","))):
        key, equals, value = (part.strip() for part in word.partition("="))
        if not equals and key != "auto":
            raise UserError(f'plan = "{text}": {word!r} is neither "auto" nor KEY=VALUE, such as tp=2.')
        if equals and key == "auto":
            raise UserError(f'plan = "{text}": auto takes no value. Write "auto".')
        if key in words:
            raise UserError(f'plan = "{text}": {key} is there twice. Keep one.')
        words[key] = value
    return words


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _toml(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else _word(value)
