"""The real step of one rank on a GPU that is not there: where the host waits for it, what is misplaced, what races.

A mode answers for fake tensors on `cuda`, where torch without CUDA has no answer.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from operator import floordiv
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes

from argosy.accelerator import NVIDIA
from argosy.checkpoint.exchange import travels
from argosy.checkpoint.shards import box_bytes, write_shard
from argosy.config.schema import RunConfig
from argosy.errors import UserError
from argosy.models.microbatch import microbatches, with_mask_keys
from argosy.observe.clock import StepClock
from argosy.observe.collectives import CommunicationMeter
from argosy.parallel.apply import apply
from argosy.parallel.expert import loads_by_layer
from argosy.parallel.world import World
from argosy.plan.cost.exact_state import dp_rank_of
from argosy.plan.plan import FP8, HOPPER, Plan, check_can_estimate
from argosy.simulate.cuda_calls import BLACKWELL, FakeDevice, answered
from argosy.simulate.device_watch import DeviceFinding, DeviceWatch
from argosy.simulate.fake import fake_memory, fake_world, replaced
from argosy.simulate.fake_cuda import CUDA, META, FakeCudaMode, MisplacedTensor, is_on_cuda, values_of
from argosy.simulate.simulate import without_values
from argosy.training.evaluation import HeldOut, evaluate
from argosy.training.records import Records
from argosy.training.services.noise_scale import NoiseScale
from argosy.training.services.norms import LayerNorms
from argosy.training.state import TrainState
from argosy.training.step import Step

TENSOR, GENERATOR = torch.tensor, torch.Generator
HALF = (torch.bfloat16, torch.float16)
aten = torch.ops.aten


def _address(tensor: Tensor) -> int:
    """Return an address: as long as its memory lives, no other tensor has it."""
    if not isinstance(tensor, FakeTensor):
        return tensor.data_ptr()
    return id(tensor.untyped_storage()) + int(tensor.storage_offset()) * tensor.element_size()


def _pinned(device: FakeDevice, tensor: Tensor, *_: Any) -> Tensor:
    copy = tensor.clone()
    device.pin(copy)
    return copy


def _new_tensor(like: Tensor, data: Any, dtype: torch.dtype | None = None, device: Any = None, **kwargs: Any) -> Tensor:
    return _tensor(data, dtype or like.dtype, device or like.device, **kwargs)


def _tensor(data: Any, dtype: torch.dtype | None = None, device: Any = None, **kwargs: Any) -> Tensor:
    """Make a tensor of numbers as torch does on a GPU: in host memory, then copied."""
    if device is None or torch.device(device).type != NVIDIA:
        return TENSOR(data, dtype=dtype, device=device, **kwargs)
    return TENSOR(data, dtype=dtype, **kwargs).to(device)


def _generator(device: Any = "cpu") -> torch.Generator:
    """Return a generator: the host's, since fake numbers need no others."""
    return GENERATOR()


def _attention(q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None, *args: Any, **kwargs: Any) -> Tensor:
    """Choose as torch does on a GPU: FlashAttention for half precision without a mask; else its plain formula."""
    names = ("dropout_p", "is_causal")
    given = dict(zip(names, args, strict=False)) | kwargs
    if not is_on_cuda(q):
        return torch._C._nn.scaled_dot_product_attention(q, k, v, attn_mask, **given)
    scale, causal, gqa = given.get("scale"), given.get("is_causal", False), given.get("enable_gqa", False)
    if q.dtype in HALF and attn_mask is None and q.shape[-1] <= 256 and q.shape[-1] == v.shape[-1]:
        width, missing = q.shape[-1], -q.shape[-1] % 8
        q, k, v = (F.pad(x, (0, missing)) if missing else x for x in (q, k, v))
        scale = width**-0.5 if scale is None else scale
        y = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)[0]
        return y[..., :width] if missing else y
    if attn_mask is None and causal:
        attn_mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
    if gqa:
        k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    return scores.softmax(-1) @ v


def _scaled_by_group(
    a: Tensor, b: Tensor, a_scales: Tensor, _: Any, b_scales: Tensor, __: Any, *, offs: Tensor, **kwargs: Any
) -> Tensor:
    """Check and shape as torch does for the private operator before the public one, of which it cannot."""
    return aten._scaled_grouped_mm(a, b, a_scales, b_scales, offs, out_dtype=kwargs["output_dtype"])


def _of_local(name: str) -> property:
    return property(lambda tensor: getattr(tensor._local_tensor, name))


@contextmanager
def seen_as_cuda(watch: DeviceWatch, device: FakeDevice) -> Iterator[None]:
    """Make fake tensors of `cuda` such that autograd, which looks at their device in C++, asks for no GPU."""
    to_list, make_wrapper = FakeTensor.tolist, Tensor._make_wrapper_subclass
    make, group = Tensor._make_subclass, torch._C._group_tensors_by_device_and_dtype

    def made(cls: Any, elem: Tensor, *args: Any, **kwargs: Any) -> Any:
        keys = kwargs.get("device_for_backend_keys")
        if cls is FakeTensor and keys is not None and torch.device(keys).type == NVIDIA:
            kwargs["dispatch_device"] = False
        return make(cls, elem, *args, **kwargs)

    def grouped(*args: Any, **kwargs: Any) -> Any:
        return {
            (CUDA if device == META else device, *key): some for (device, *key), some in group(*args, **kwargs).items()
        }

    def is_on(kind: str) -> property:
        return property(lambda tensor: tensor.fake_device.type == kind)

    def listed(tensor: FakeTensor) -> Any:
        if not is_on_cuda(tensor):
            return to_list(tensor)
        watch.host_waits("numbers are read")
        with _disable_current_modes():
            return values_of(tensor).tolist()

    def wrapper(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == NVIDIA:
            kwargs["device"] = META
        return make_wrapper(cls, *args, **kwargs)

    # Not by `FunctionCalls`: torch turns that off in backward, whose hooks ask too.
    answers: list[tuple[Any, str, Any]] = [
        (Tensor, "_make_subclass", staticmethod(made)),
        (Tensor, "_make_wrapper_subclass", staticmethod(wrapper)),
        (DTensor, "device", _of_local("device")),
        (torch._subclasses.fake_tensor, "init_gpu_context", lambda _: None),
        (torch._C, "_group_tensors_by_device_and_dtype", grouped),
        (FakeTensor, "tolist", listed),
        (FakeTensor, "data_ptr", _address),
        (Tensor, "pin_memory", lambda tensor, *_: _pinned(device, tensor)),
        (Tensor, "is_pinned", lambda tensor, *_, **__: device.is_pinned(tensor)),
        (Tensor, "record_stream", lambda tensor, stream, *_: device.clocks.keep_for(tensor, stream.name)),
        (Tensor, "new_tensor", _new_tensor),
        (torch, "tensor", _tensor),
        (torch, "as_tensor", _tensor),
        (torch, "Generator", _generator),
        (F, "scaled_dot_product_attention", _attention),
        (F, "scaled_grouped_mm", _scaled_by_group),
    ]
    for name, kind in {"is_cuda": NVIDIA, "is_cpu": "cpu", "is_meta": "meta"}.items():
        answers += [(FakeTensor, name, is_on(kind)), (DTensor, name, _of_local(name))]
    with ExitStack() as stack:
        for owner, name, answer in answers:
            stack.enter_context(replaced(owner, name, answer))
        yield


DOCUMENT_END_ID = 0
WARM_UP_STEPS = 2
"""Steps that make what later ones keep: moments, pinned memory, compressors' residuals."""
MOST_COPIED_BYTES = 2**26
"""In-memory checkpoints of larger parts of the state are left out: they would take the host's memory."""


@dataclass(frozen=True)
class CudaFinding(DeviceFinding):
    """Something that the step does on a GPU, and how often."""

    count: int


@dataclass(frozen=True)
class CudaRecord:
    """The findings of one rank's step on a GPU."""

    rank: int
    plan: str
    host_syncs_a_step: int
    """Waits of the host in a step that has nothing due besides."""
    host_syncs: list[CudaFinding]
    """Waits of the host for the device."""
    misplaced: list[CudaFinding]
    """Tensors on another device than those that they meet."""
    races: list[CudaFinding]
    """Accesses of two streams to one memory, with no event between."""

    def __str__(self) -> str:
        waits = f"the host waits for the device {self.host_syncs_a_step} times in a step that has nothing due besides"
        lines = [f"rank {self.rank} of {self.plan} on {CUDA}: {waits}"]
        for name, some in (("misplaced", self.misplaced), ("waits", self.host_syncs), ("races", self.races)):
            lines += [name] * bool(some)
            lines += [f"  {f.count:>5} x {f.part:28} {f.where:32} {f.what}" for f in some]
        return "\n".join(lines + ["no races between streams"] * (not self.races))


@contextmanager
def fake_cuda(rank: int, size: int, watch: DeviceWatch, capability: tuple[int, int] = HOPPER) -> Iterator[World]:
    """Be rank `rank` of `size` on a GPU that is not there, in this process alone."""
    device = FakeDevice(watch)
    mode = FakeCudaMode(watch, device)
    with answered(device, watch, capability), seen_as_cuda(watch, device), fake_world(rank, size):
        host = dist.new_group(backend="fake") if size > 1 else None
        if host is not None:
            mode.host_groups.add(host.group_name)
        with mode.calls, fake_memory(mode):
            yield World(rank, size, CUDA, host)


def step_on_cuda(plan: Plan, run: RunConfig, rank: int) -> CudaRecord:
    """Run the real step of rank `rank` under `plan` on fake tensors of a GPU; nothing is compiled.

    Then once more with each thing that is due in some steps only: fingerprints, the noise scale, norms by layer; and an
    evaluation. Raises: UserError if it cannot be simulated.
    """
    if run.train.objective != "pretrain":
        raise UserError(
            f'train.objective = "{run.train.objective}": --device cuda takes steps on text. Try train.objective = '
            "pretrain, which has the same layers, or leave --device out."
        )
    watch = DeviceWatch()
    try:
        if plan.precision in FP8 and find_spec("torchao") is not None:
            for module in ("torchao.float8", "torchao.prototype.moe_training.mxfp8_linear"):
                import_module(module)  # while torch is as it was: modules name its classes in annotations
        capability = BLACKWELL if plan.precision == "mxfp8" else HOPPER
        with fake_cuda(rank, plan.world_size, watch, capability) as world:
            _run(plan.model_copy(update={"compile": False}), run, world, watch)
    except MisplacedTensor:
        if not watch.misplaced:
            raise
    waits, misplaced, races = (
        [CudaFinding(**vars(found), count=count) for found, count in sorted(some.items())]
        for some in (watch.host_syncs, watch.misplaced, watch.races)
    )
    a_step = sum(found.count for found in waits if found.part == "step")
    return CudaRecord(rank, str(plan), a_step, waits, misplaced, races)


def _run(plan: Plan, run: RunConfig, world: World, watch: DeviceWatch) -> None:
    rank = _Rank(plan, run, world)
    for _ in range(WARM_UP_STEPS):
        rank.step(is_all_due=True)
    with watch.counting("step"):
        rank.step()
    with watch.counting("what is due now and then"):
        rank.step(is_all_due=True)
    with watch.counting("evaluation"):
        rank.evaluate()
    if rank.state_bytes() <= MOST_COPIED_BYTES:
        with watch.counting("in-memory checkpoint"):
            rank.copy_state()


class _Rank:
    """One rank: its model and state, and what takes part in its steps."""

    def __init__(self, plan: Plan, run: RunConfig, world: World) -> None:
        self._plan, self._run, self._world = plan, run, world
        due = run.with_keys(
            observe={"noise_scale_every_steps": 1, "norms_every_steps": 1}, resilience={"fingerprint_every_steps": 1}
        )
        try:
            check_can_estimate(due, plan)
        except UserError:  # not under this plan
            due = due.with_keys(observe={"noise_scale_every_steps": run.observe.noise_scale_every_steps})
        model = apply(plan, due, world, partial(without_values, run.data.seq_len))
        self._state = TrainState.begin(model, plan, run)
        axes, node = model.meshes.axis_of_groups(), partial(floordiv, 8)
        self._clock = StepClock(world.device, communication=CommunicationMeter(axes, node, world.device))
        plain = run
        if run.resilience.fingerprint_every_steps > 1:
            plain = run.with_keys(resilience={"fingerprint_every_steps": 0})
        self._plain, self._due = (Step(some, self._state, world, self._clock) for some in (plain, due))
        # It reads the records of earlier runs when it starts, which it does not here.
        self._noise = NoiseScale(due, plan, self._state, cast(Records, None))
        self._norms = LayerNorms(due, model, world)

    def step(self, is_all_due: bool = False) -> None:
        """Do one step, from the batch to the log."""
        step, state, number = self._due if is_all_due else self._plain, self._state, self._state.step
        with self._clock.time("data"):
            batch = microbatches(self._rows(), self._plan.microbatch, DOCUMENT_END_ID, self._world.device)
            batch = with_mask_keys(batch, self._run, number, first_row=0)
        if is_all_due:
            self._noise.before_forward(number, batch)
        loss = step.forward_backward(batch)
        outcome = step.exchange(loss, measure=lambda: {"noise": self._noise.measure() if is_all_due else ()})
        if is_all_due:
            self._noise.after_exchange(outcome, outcome.sums["noise"])
        update = step.update(outcome, self._run.optimizer.lr)
        step.apply(update, self._norms if is_all_due else None)
        self._clock.lap()
        self._norms.line(number)
        if state.last_update is not None and state.last_update.loads is not None:
            loads_by_layer(state.last_update.loads, self._run.model)

    def evaluate(self) -> None:
        """Score the model on as many rows as a step has."""
        evaluate(self._state.model, HeldOut(self._rows(), 1.0, DOCUMENT_END_ID), self._plan.microbatch, self._world)

    def state_bytes(self) -> int:
        return sum(map(box_bytes, self._state.to_save()))

    def copy_state(self) -> None:
        """Copy this rank's part of the state into a file in memory, as in-memory checkpoints do."""
        file = os.memfd_create("argosy-simulate")
        try:
            tensors = self._state.to_save()
            write_shard(file, tensors, {}, [box for box in tensors if travels(box)])
        finally:
            os.close(file)

    def _rows(self) -> npt.NDArray[np.int32]:
        """Return this rank's rows of a step, each of three documents of unlike lengths."""
        plan, run = self._plan, self._run
        many = plan.microbatches_of(dp_rank_of(self._world.rank, plan), run.train.global_batch) * plan.microbatch
        rows = np.ones((many, run.data.seq_len + 1), dtype=np.int32)
        rows[:, run.data.seq_len // 3] = rows[:, run.data.seq_len // 2] = DOCUMENT_END_ID
        return rows
