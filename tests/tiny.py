"""The smallest real run: a two-layer model on the sources of a package."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import numpy as np
import pydantic
import torch

from argosy.checkpoint import store
from argosy.checkpoint.load import load_into
from argosy.checkpoint.shards import wholes
from argosy.config.data import PrepareConfig
from argosy.config.model import ModelConfig
from argosy.config.schema import RunConfig
from argosy.data.prepare import prepare
from argosy.data.tokenizer import train as train_tokenizer
from argosy.extend.loading import approve
from argosy.models.decoder import Decoder
from argosy.models.initialize import materialize
from argosy.models.microbatch import Microbatch
from argosy.observe.clock import StepClock
from argosy.observe.events import Metrics
from argosy.parallel.apply import apply
from argosy.parallel.model import ParallelModel
from argosy.parallel.world import World
from argosy.plan.plan import Plan
from argosy.training.loop import train
from argosy.training.state import TrainState
from argosy.training.step import Step
from argosy.training.stop import StopSignal, WorldIsOver

SOURCES = Path(pydantic.__file__).parent
"""Real text that `constraints.txt` holds fast: with our own, any edit would give all runs other numbers."""
MODEL = {
    "layers": 2,
    "width": 32,
    "heads": 4,
    "kv_heads": 2,
    "head_width": 8,
    "ffn_width": 64,
    "vocab_size": 400,
}
LATENT = {
    "kv_heads": 4,
    "head_width": 4,
    "mla": {"q_rank": 12, "kv_rank": 8, "nope_width": 8, "rope_width": 4, "value_width": 8},
}
"""What makes it one with latent attention."""
DELTA_NET = {"key_heads": 4, "value_heads": 8, "key_width": 8, "value_width": 6}
"""The linear layers of a model that has some."""
LINEAR = {"attention": {"layers": ["linear", "full"]}, "delta_net": DELTA_NET}
BATCH = 8


def eager(plan: str) -> Plan:
    """The plan that `plan` writes down, without torch.compile, which costs more than these runs.

    Unless it says so, a rank has two microbatches, or as many as its pipeline has stages: of so few and small rows each
    takes as long as a large one.
    """
    layout = Plan.parse(plan).model_copy(update={"compile": False})
    if "microbatch=" in plan:
        return layout
    return layout.model_copy(update={"microbatch": max(1, BATCH // (layout.portions * max(2, layout.stages)))})


EAGER = eager("")


def prepare_corpus(out: Path, **keys: Any) -> Path:
    """Prepare a package's Python files into `out`."""
    defaults = {"input": (str(SOURCES),), "vocab_size": MODEL["vocab_size"], "validation_fraction": 0.1, "processes": 1}
    prepare(PrepareConfig(out=out, **{**defaults, **keys}))
    return out


def prepare_chats(folder: Path, lines: list[str], objective: str, seq_len: int) -> Path:
    """Prepare lines of JSON in `folder`, with a tokenizer of their own."""
    (folder / "chats.jsonl").write_text("\n".join(lines))
    train_tokenizer(lines, MODEL["vocab_size"], folder / "tokenizer.json")
    tokenizer = {"tokenizer": folder / "tokenizer.json", "chat_template": "chatml"}
    keys = {"input": (str(folder / "chats.jsonl"),), "objective": objective, "seq_len": seq_len}
    prepare(PrepareConfig(out=folder / "prepared", **tokenizer, **keys, validation_fraction=0.1, processes=1))
    return folder / "prepared"


def run_config(corpus: Path, **sections: dict[str, Any]) -> RunConfig:
    """A run of 8 steps on `corpus`; `sections` override single keys. Its code is approved, as by `argosy train`."""
    base: dict[str, dict[str, Any]] = {
        "model": MODEL,
        "data": {"sources": {str(corpus): 1.0}, "seq_len": 32},
        "train": {"steps": 8, "global_batch": BATCH},
        "optimizer": {"lr": 1e-2},
        "schedule": {"warmup_steps": 2},
        "evaluate": {"every_steps": 4, "tokens": 500},
        "checkpoint": {"every_minutes": 0},
        "launch": {"threads": 1},
        "resilience": {"node_check_s": 0.02},
    }
    merged = {name: {**base.get(name, {}), **sections.get(name, {})} for name in base | sections}
    run = RunConfig.model_validate({"name": "tiny", **merged})
    approve(run.extend.code)
    return run


def model_config(**keys: Any) -> ModelConfig:
    """The tiny model, with `keys` changed."""
    return ModelConfig.model_validate({**MODEL, **keys})


def decoder(seed: int = 0, **keys: Any) -> Decoder:
    """The tiny model itself, on the CPU."""
    model = Decoder(model_config(**keys))
    materialize(model, model.config, torch.device("cpu"), seed)
    return model


def laid_out(world: World, plan: Plan, **sections: dict[str, Any]) -> ParallelModel:
    """The tiny model, with the initial weights of `decoder`, as `plan` lays it out; `sections` as in `run_config`."""
    return apply(plan, run_config(Path("no data"), **sections), world)


def train_step(world: World, plan: Plan, clock: StepClock | None = None, **sections: dict[str, Any]) -> Step:
    """The training step of that model, with nothing done yet."""
    run = run_config(Path("no data"), **sections)
    return Step(run, TrainState.begin(apply(plan, run, world), plan, run), world, clock or StepClock(world.device))


def made_step(step: Step, batch: list[Microbatch], lr: float) -> list[float]:
    """Make a step, and return its loss and the gradient's norm."""
    outcome = step.exchange(step.forward_backward(batch))
    step.apply(step.update(outcome, lr))
    return [outcome.loss, outcome.gradient_norm]


def whole_parameters(model: ParallelModel) -> dict[str, np.ndarray]:
    """What this rank has a part of, whole; all ranks call it together."""
    model.settle()
    pieces = (*model.pieces, *model.frozen)
    return {piece.name: piece.gather(piece.value.detach()).clone().numpy() for piece in pieces}


def plain_adamw(model: torch.nn.Module, lr: float) -> torch.optim.AdamW:
    """torch's own, with our settings, for what `model` trains."""
    left = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in left if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in left if p.ndim == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-6)


def gradients(model: ParallelModel) -> dict[str, torch.Tensor]:
    """The whole gradients of this rank's parameters; its fellows call it too."""
    return {piece.name: piece.gather(piece.value.grad) for piece in model.pieces if piece.value.grad is not None}


def flip(tensor: torch.Tensor, index: int, bit: int) -> None:
    """Flip one bit of the `index`-th number."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]
    word = tensor.detach().view(integers).view(-1)[index : index + 1]
    width = 8 * tensor.element_size()
    word ^= torch.tensor((1 << bit) - (1 << width if bit == width - 1 else 0), dtype=integers)


class StopAfter(StopSignal):
    """Asks for a stop in the last of `steps` steps, as SIGTERM would: the loop looks once a step."""

    def __init__(self, steps: int):
        super().__init__()
        self._steps_left = steps

    def is_requested(self) -> bool:
        self._steps_left -= 1
        if self._steps_left <= 0:
            self.number = signal.SIGTERM
        return super().is_requested()


class OverAfter(StopSignal):
    """The world is over once so many steps are made in it."""

    def __init__(self, steps: int):
        super().__init__()
        self._left = steps

    def between_steps(self) -> None:
        if self._left == 0:
            raise WorldIsOver
        self._left -= 1  # it is asked before the first step, and after each


def train_in(
    world: World, run: RunConfig, plan: Plan, run_dir: Path, stop_after: int | None = None
) -> list[dict[str, Any]]:
    """Train in this process as one rank of `world`; the metric records of the run so far."""
    stop = StopSignal() if stop_after is None else StopAfter(stop_after)
    train(run, plan, world, run_dir, stop)
    return Metrics(run_dir).read()


def losses(records: list[dict[str, Any]]) -> list[float]:
    """The training loss of each step."""
    return [record["loss"] for record in records if "loss" in record]


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    """The model in the newest whole checkpoint of `run_dir`."""
    choice = store.newest_whole(run_dir)
    assert choice is not None
    model = dict(decoder(seed=99).named_parameters())
    load_into(wholes(model, "model."), choice.checkpoint)
    return {name: tensor.detach() for name, tensor in model.items()}
