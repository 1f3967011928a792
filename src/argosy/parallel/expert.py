"""Expert parallelism (Lepikhin et al. 2020, "GShard"): each rank has some of the experts, and tokens travel to them.

The ranks of the ep group read different tokens. A rank sorts its tokens by expert, sends each rank those for its
experts, computes what it receives, and sends the results back. However uneven the shares are, nothing is dropped or
padded, and a token's result is that of a single process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from argosy.accelerator import sent_to
from argosy.config.model import ModelConfig
from argosy.models.adapters import LowRank
from argosy.models.experts import Compute, Experts, Load, MoE, Rows, inverse, take_rows
from argosy.parallel.tensor import Between, SequenceParallel, split, sum_over_ranks
from argosy.plan.parameters import Table

# n ranks, E experts, e of them on each rank, P pairs of token and expert that this rank has, Q that it computes
# D model width, B rows, T tokens of a row, t of them on this rank, K experts of a token


class ExpertParallel:
    """Stands in for `models.experts.at_home` where rank r of `group` has experts r*e up to (r+1)*e.

    `Experts` must hold these alone, as its weights' first dim says. All ranks of the group call it alike.
    """

    def __init__(self, group: dist.ProcessGroup):
        self._group = group

    def __call__(self, batches: Sequence[tuple[Tensor, Tensor]], compute: Compute) -> Iterator[Tensor]:
        sent_ne = torch.stack([counts_E for _, counts_E in batches]).view(len(batches), self._group.size(), -1)
        sent_nbe = sent_ne.transpose(0, 1).contiguous()
        received_nbe = torch.empty_like(sent_nbe)
        dist.all_to_all_single(received_nbe, sent_nbe, group=self._group)
        # The one time that the host waits for the device: a message's length must be known.
        send_bn, receive_bn = torch.stack((sent_nbe.sum(2), received_nbe.sum(2))).mT.tolist()
        arriving = [
            SentRows(x_PD[: sum(send)], send, receive, self._group)  # what a capacity has dropped is left out
            for (x_PD, _), send, receive in zip(batches, send_bn, receive_bn, strict=True)
        ]
        return self._results(arriving, received_nbe, compute)

    def _results(self, arriving: Sequence[SentRows], received_nbe: Tensor, compute: Compute) -> Iterator[Tensor]:
        """Compute what arrives, and yield what comes back."""
        returning = []
        for rows, received_ne in zip(arriving, received_nbe.unbind(1), strict=True):
            order_Q = _by_expert(received_ne, sum(rows.receive))
            places_Q = inverse(order_Q)
            y_QD = compute(take_rows(rows.received(), order_Q, places_Q[:, None]), received_ne.sum(0))
            back = take_rows(y_QD, places_Q, order_Q[:, None])
            returning.append(SentRows(back, rows.receive, rows.send, self._group))
        for rows in returning:
            yield rows.received()


def split_experts(
    experts: Experts, mesh: DeviceMesh, table: Table, between: Between = SequenceParallel, parts: int = 1
) -> None:
    """Deal `experts` (on the meta device) out over the ep dim of `mesh`, and each over its tp dim, in place; `table`:
    their parameters; `parts`: those in which tokens travel.

    Each tp rank has some of an expert's hidden columns. It computes all their tokens with these, and the ranks add the
    results up: the inputs are gathered, and the sums are left split by tokens, as around a dense feed-forward.
    """
    names = mesh.mesh_dim_names or ()
    if "ep" in names:
        experts.exchange = ExpertParallel(mesh["ep"].get_group())
        experts.parts = parts
    if "tp" in names:
        group = mesh["tp"].get_group()
        experts.share_of_bias = 1 / group.size()
        tokens = between(group)
        experts.register_forward_pre_hook(lambda _, inputs: tuple(tokens.gather(x) for x in inputs))
        experts.register_forward_hook(lambda _, inputs, results: (tokens.reduce(results[0]), results[1]))
        if isinstance(experts.down_lora, LowRank):  # each rank has some of its inputs
            experts.down_lora.sum_squares = partial(sum_over_ranks, group=group)
    for name, parameter in table.items():
        dims = {"ep": 0, "tp": parameter.tp_dim}
        owner, _, own = name.rpartition(".")
        split(experts.get_submodule(owner), own, mesh, *(dims[axis] for axis in names))


class SentRows:
    """Rows on their way between ranks: the first send[0] of `x_PD` to rank 0, the next send[1] to rank 1, ...;
    `receive`: how many come from each.

    In backward their gradients travel back, from the place of `received` in the graph to that of the sending: what was
    computed between these in forward has its backward between them too.
    """

    def __init__(self, x_PD: Tensor, send: Sequence[int], receive: Sequence[int], group: dist.ProcessGroup):
        self.send, self.receive, self._group = list(send), list(receive), group
        self._messages: list[tuple[Any, Tensor, Tensor]] = []
        self._y: Tensor | None = _Send.apply(x_PD, self)

    def received(self) -> Tensor:
        """Wait for the rows, and return them in order of ranks. Call it once."""
        y: Tensor = _Receive.apply(self._y, self)
        self._y = None
        return y

    def depart(self, x: Tensor, is_gradient: bool) -> Tensor:
        """Start sending rows, or gradients the other way; return the memory for what comes."""
        send, receive = (self.receive, self.send) if is_gradient else (self.send, self.receive)
        x, y = x.contiguous(), x.new_empty(sum(receive), *x.shape[1:])
        work = dist.all_to_all_single(y, x, receive, send, group=self._group, async_op=True)
        self._messages.append((work, x, y))  # their memory must last until it is there
        return y

    def arrive(self) -> Tensor:
        """Wait for what departed, and return it."""
        work, _, y = self._messages.pop()
        work.wait()
        return y


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: SentRows) -> Tensor:
        ctx.rows = rows
        return rows.depart(x, is_gradient=False)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.rows.arrive(), None


class _Receive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, rows: SentRows) -> Tensor:
        ctx.rows = rows
        return rows.arrive().view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.rows.depart(grad, is_gradient=True)
        return grad, None  # for autograd, which checks shapes; `_Send` returns what comes


def _by_expert(received_ne: Tensor, total: int) -> Tensor:
    """Return the order that turns rows sorted by rank, then by expert, into rows sorted by expert, then by rank."""
    n, e = received_ne.shape
    expert_Q = torch.arange(e, device=received_ne.device).repeat(n)
    return expert_Q.repeat_interleave(received_ne.flatten(), output_size=total).argsort(stable=True)


class SplitRows(Rows):
    """Operations on whole rows, where the ranks of `group` share each row (context or sequence parallelism).

    `join` puts what all ranks have [B, t, ...] in the order of the row; `cut` takes this rank's part out of that.
    `around`: the rows that such a row is itself a part of, if two axes split it.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        join: Callable[[list[Tensor]], Tensor],
        cut: Callable[[Tensor], Tensor],
        around: Rows | None = None,
    ):
        self._group, self._join, self._cut, self._around = group, join, cut, around or Rows()
        self.ranks = group.size() * self._around.ranks

    def sum(self, x: Tensor) -> Tensor:
        """Sum over the ranks that share the rows; no gradient."""
        total = x.detach().clone()
        dist.all_reduce(total, group=self._group)
        return self._around.sum(total)

    def places(self, experts_BTK: Tensor) -> Tensor:
        """See `models.experts.places_in_row`: of this rank's tokens, counting those of all ranks."""
        parts = [torch.empty_like(experts_BTK) for _ in range(self._group.size())]
        dist.all_gather(parts, experts_BTK.contiguous(), group=self._group)
        return self._cut(self._around.places(self._join(parts)))


def loads_of(mine: Mapping[int, MoE], config: ModelConfig, device: torch.device) -> Tensor | None:
    """Take this rank's loads of the step, fp64 [layers, 2E+1]: to be summed over all ranks. None without experts.

    `mine`: this rank's MoE layers by number. Where several ranks count the same tokens they all do so alike, which
    changes neither the biases nor a `Load`, except for its counts.
    """
    if not config.moe.experts:
        return None
    loads = torch.zeros(config.all_layers, 2 * config.moe.experts + 1, dtype=torch.float64, device=device)
    for layer, moe in mine.items():
        loads[layer] = moe.take_load()
    return loads


def update_biases(mine: Mapping[int, MoE], loads: Tensor) -> None:
    """Move the experts' biases by the loads of all ranks, in host memory: the same on all ranks that have the layer."""
    moved = {
        layer: moe for layer, moe in mine.items() if moe.router.bias is not None and moe.router.weight.requires_grad
    }
    if not moved:  # a frozen router keeps its biases
        return
    counts = sent_to(next(iter(moved.values())).router.weight.device, loads[:, : loads.shape[1] // 2].contiguous())
    for layer, moe in moved.items():
        moe.update_bias(counts[layer])


def loads_by_layer(loads: Tensor, config: ModelConfig) -> dict[int, Load]:
    """Return how each MoE layer's experts were used, from the loads of all ranks; the host waits for the device."""
    host = loads.cpu()
    return {layer: Load.of(host[layer]) for layer in range(config.all_layers) if config.is_moe_layer(layer)}
