"""The decorators that mark functions as extensions. Their arguments are read from the file before any of it is run.

`Run` and `Update` are what the user's code sees of a run, `POINTS` when it is called. torch is only named.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeAlias, TypeVar, get_args

from argosy.errors import near_names

if TYPE_CHECKING:
    from torch import Tensor

Point = Literal["start", "before_step", "after_backward", "after_exchange", "after_step", "evaluate", "save", "end"]
"""The moments of a callback. start: the state is there, and training is about to begin, also after a recovery;
before_step; after_backward: this rank's gradients are summed over all ranks; after_exchange: loss and gradient norm
are known, the same on all ranks, and nothing is updated yet; after_step: the weights are updated; evaluate: held-out
text was scored; save: a checkpoint is being written; end: the run ends here, with its state saved."""

POINTS: tuple[Point, ...] = get_args(Point)


class Run(Protocol):
    """A run and its step at hand, on one rank: to read. Numbers that are not known yet are NaN."""

    @property
    def name(self) -> str:
        """The run's name."""

    @property
    def folder(self) -> Path:
        """The run's folder. Files of yours belong in a folder of their own in it."""

    @property
    def rank(self) -> int:
        """This process, 0 ... world_size - 1. Only rank 0 should write files or print."""

    @property
    def world_size(self) -> int:
        """The number of processes. After a recovery it may be another."""

    @property
    def step(self) -> int:
        """The step at hand, counted from 0 as in metrics.jsonl."""

    @property
    def steps(self) -> int | None:
        """The steps of the run; None as long as a run in minutes does not know them."""

    @property
    def tokens(self) -> int:
        """Tokens trained on so far, over all ranks."""

    @property
    def loss(self) -> float:
        """Training loss of the step, known from after_exchange on: nats, the mean over the tokens of all ranks, or over
        their pairs or answers where preferences are learned."""

    @property
    def grad_norm(self) -> float:
        """Norm of the step's gradient over all parameters, before clipping; known from after_exchange on."""

    @property
    def lr(self) -> float:
        """The learning rate of the step; known from after_step on."""

    @property
    def validation_loss(self) -> float:
        """Loss on held-out text, nats a token (of a reward model, nats a pair); that of the newest evaluation since
        this process started."""

    def weights(self) -> Mapping[str, Tensor]:
        """Return this rank's parts of the parameters, by name: live tensors, local shapes. Do not write to them."""

    def gradients(self) -> Mapping[str, Tensor]:
        """Return the gradients of `weights()`, local shapes: sums over all ranks, of the mean loss a token.

        They exist in a metric and at after_exchange, before clipping; elsewhere the mapping is empty.
        """

    def log(self, /, **values: float) -> None:
        """Write numbers into the line of the step in metrics.jsonl, under "user"; the last value of a name counts.

        Rank 0's values are written; those of other ranks are not. A metric is for means over ranks. Values that are
        not finite are left out. Raises: TypeError if a value is no number.
        """


Loss: TypeAlias = "Callable[[Tensor, Tensor], Tensor]"
"""Logits [C, V] and targets [C] to a loss for each token [C]."""


@dataclass(frozen=True)
class Update:
    """One step of this rank's part of one parameter, for an optimizer. Its tensors are fp32 and changed in place."""

    name: str
    """The parameter's name in the whole model, such as blocks.0.attention.q.weight."""
    weight: Tensor
    """Local shape."""
    gradient: Tensor
    """Local shape; summed over ranks and clipped."""
    moments: Mapping[str, Tensor]
    """The optimizer's state by its names; local shape."""
    step: int
    """Number of the parameter's step, from 1."""
    lr: float
    """The learning rate of the step, with the factor of the parameter's group."""
    weight_decay: float
    """Weight decay of the parameter: 0 for norms and biases, unless its group says otherwise."""
    settings: Mapping[str, float]
    """beta1, beta2, momentum and eps of the run file's table `optimizer`."""


Kind = Literal["callback", "metric", "loss", "optimizer", "source", "sink", "family"]
FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
ClassT = TypeVar("ClassT", bound=type)
EXTENSION_NAME = re.compile(r"[A-Za-z_][\w.-]{0,63}")


@dataclass(frozen=True)
class Registration(Generic[FunctionT]):
    """A decorator with its arguments; called with the function, it remembers it."""

    kind: Kind
    name: str
    """Empty for a callback: its name is that of its function."""
    arguments: int
    """Number of arguments of the function."""
    facts: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, function: FunctionT) -> FunctionT:
        """Remember `function`, and return it as it is."""
        key = extension_key(self.kind, self.name or function.__name__, self.facts)
        _REGISTERED.setdefault(function.__module__, {})[key] = function
        return function


class ClassRegistration(Registration[Any]):
    """A registration that stands above a class."""

    def __call__(self, function: ClassT) -> ClassT:
        """Remember the class, and return it as it is."""
        return super().__call__(function)


ExtensionKey = tuple[str, str, str]
"""Kind, name, and the point of a callback: what may be there only once."""
_REGISTERED: dict[str, dict[ExtensionKey, Callable[..., Any]]] = {}


def extension_key(kind: str, name: str, facts: Mapping[str, Any]) -> ExtensionKey:
    return kind, name, str(facts.get("point", ""))


def registered_by(module: str) -> Mapping[ExtensionKey, Callable[..., Any]]:
    """Return the functions of `module` by what they were registered as, in order."""
    return _REGISTERED.get(module, {})


def callback(point: Point, *, strict: bool = False) -> Registration[Callable[[Run], None]]:
    """Call the function with the `Run` at `point` of each step, on every rank.

    If it raises, it is switched off, and the run goes on; with `strict`, the run ends. It may not change weights,
    gradients or random numbers.
    """
    if point not in POINTS:
        raise ValueError(f"there is no point {point!r}; {near_names(str(point), POINTS, 1)}")
    return Registration("callback", "", 1, {"point": point, "strict": _bool("strict", strict)})


def metric(
    name: str, *, reduce: Literal["mean", "sum"] = "mean", strict: bool = False
) -> Registration[Callable[[Run], float]]:
    """Call the function in each step, on every rank, and log the mean (or sum) over ranks of what it returns.

    It is called when gradients are summed, and its numbers travel in the exchange that all ranks make anyway. A rank
    whose number is not finite is left out. If it raises, it is switched off on that rank; with `strict`, the run ends.
    """
    if reduce not in ("mean", "sum"):
        raise ValueError(f'reduce = {reduce!r} must be "mean" or "sum"')
    return Registration("metric", _name(name), 1, {"reduce": reduce, "strict": _bool("strict", strict)})


def loss(name: str, *, deterministic: bool = True) -> Registration[Loss]:
    """Make the function a loss that a run file may name in `train.loss`.

    It is given logits [C, V] (fp32, C tokens of a chunk, the whole vocabulary) and targets [C] (int64), and returns a
    loss for each token, [C]; autograd gives the gradient. A token's loss may depend on that token's logits and target
    alone. Held-out text is still scored by the cross-entropy, so that runs compare.
    """
    return Registration("loss", _name(name), 2, {"deterministic": _bool("deterministic", deterministic)})


def optimizer(
    name: str, *, moments: tuple[str, ...] = (), deterministic: bool = True
) -> Registration[Callable[[Update], None]]:
    """Make the function an optimizer that a run file may name in `optimizer.kind`.

    It is called with the `Update` of one parameter's part at a time, and changes `weight` and `moments` in place. Each
    element's result may depend on that element alone, since ranks have different parts under different plans.

    moments: names of the tensors that it keeps for each parameter, fp32, zeros at first; they are sharded, saved and
    predicted like those of AdamW.
    """
    if not isinstance(moments, tuple | list) or not all(isinstance(m, str) and m.isidentifier() for m in moments):
        raise ValueError(f'moments = {moments!r} must be names, such as ("momentum",)')
    if len(set(moments)) < len(moments) or "step" in moments:
        raise ValueError(f"moments = {moments!r} must be different names, and none of them step")
    facts = {"moments": tuple(moments), "deterministic": _bool("deterministic", deterministic)}
    return Registration("optimizer", _name(name), 1, facts)


def source(name: str) -> Registration[Callable[[str], Iterable[str]]]:
    """Make the function a source of text for `argosy prepare`: "source:NAME" or "source:NAME:ARGUMENT" in its input.

    It is given ARGUMENT (empty without one), and yields documents. Each call must yield the same documents again: they
    are read for the tokenizer, for the tokens, and once more after an interruption.
    """
    return Registration("source", _name(name), 1)


def sink(name: str) -> ClassRegistration:
    """Make the class a sink that a run file may name in `observe.sinks`: a subclass of `argosy.sinks.sink.Sink`.

    It lives in a process of its own, beside the run, and is told what the run has written down.
    """
    return ClassRegistration("sink", _name(name), 0)


def family(
    name: str, *, gated: bool = True, architecture: str = "", hidden_act: str = ""
) -> Registration[Callable[[Any], Any]]:
    """Make the function the activation of a model family that a run file may name in `model.family`.

    The family is Llama's but for the feed-forward: down(f(gate(x)) * up(x)) if `gated`, else down(f(up(x))), for which
    the run file says `model.ffn_gate = false`. The function is given a tensor of any shape, and returns one of the same
    shape; each element must follow from that element alone, since tensor parallelism cuts it.

    architecture, hidden_act: the class of transformers that computes the same, and its word for the function; with both
    the model can be exported. `name` is then the `model_type` of config.json.
    """
    if bool(architecture) != bool(hidden_act) or not isinstance(architecture, str) or not isinstance(hidden_act, str):
        raise ValueError("architecture and hidden_act belong together: give both, or none (then nothing is exported)")
    facts = {"gated": _bool("gated", gated), "architecture": architecture, "hidden_act": hidden_act}
    return Registration("family", _name(name), 1, facts)


DECORATORS: dict[str, Callable[..., Registration[Any]]] = {
    function.__name__: function for function in (callback, metric, loss, optimizer, source, sink, family)
}
"""The decorators, by their names, which are the kinds."""


def _name(name: object) -> str:
    if not isinstance(name, str) or not EXTENSION_NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no name; take letters, digits, _ . -, beginning with a letter")
    return name


def _bool(key: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{key} = {value!r} must be True or False")
    return value
