"""Microbatches through a pipeline whose ranks hold parts of the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from argosy.faults import fault
from argosy.models.attention import Documents
from argosy.models.decoder import Decoder
from argosy.models.microbatch import Microbatch
from argosy.models.preference import Sequences
from argosy.observe.clock import StepClock
from argosy.plan.pipeline import ScheduleRule

if TYPE_CHECKING:  # importing it loads the compiler, which a run without a pipeline may do without
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

# B batch, t tokens of this rank, D model width


class Pipeline:
    """Runs microbatches through the parts of all pipeline ranks, forward and backward, as a schedule says."""

    def __init__(
        self,
        parts: dict[int, Decoder],
        stages: int,
        rule: ScheduleRule,
        hidden_BtD: tuple[int, int, int],
        group: dist.ProcessGroup,
        microbatches: int,
    ):
        """`parts`: this rank's stages of the `stages` in all; `hidden_BtD`: shape of what goes from one to the next;
        `microbatches`: those of a step."""
        from torch.distributed.pipelining import PipelineStage

        self.microbatches_at_once = microbatches
        self._parts, self._rule, self._group, self._hidden = parts, rule, group, hidden_BtD
        self._has_last = any(part.stage.last for part in parts.values())
        self._scale: float | Tensor = 1.0
        some = next(iter(parts.values()))
        hidden = torch.empty(hidden_BtD, dtype=some.compute_dtype, device="meta", requires_grad=True)
        tokens = torch.empty(hidden_BtD[:2], dtype=torch.int64, device="meta")
        loss = torch.empty((), dtype=torch.float32, device="meta", requires_grad=True)
        self._stages = [
            PipelineStage(
                part,
                stage,
                stages,
                part.device,
                input_args=tokens if part.stage.first else hidden,
                output_args=loss if part.stage.last else hidden,
                group=group,
            )
            for stage, part in parts.items()
        ]
        self._documents: list[Documents] = []
        """The documents of the step's microbatches."""
        self._schedules: dict[int, PipelineScheduleSingle | PipelineScheduleMulti] = {}
        for part in parts.values():
            part.register_forward_pre_hook(self._with_documents, with_kwargs=True)
            part.register_forward_hook(_await_backward)

    def forward_backward(self, batch: Sequence[Microbatch], scale: float | Tensor, clock: StepClock) -> Tensor:
        self._scale = scale
        with clock.time("pipeline"):
            fault("forward")
            return self._run(batch)

    @torch.no_grad()
    def outputs(self, batch: Sequence[Microbatch]) -> list[Tensor]:
        """See `parallel.model.Schedule`. The loop is our own, stage by stage: torch's `eval` fails where one rank holds
        neighbouring stages (V schedules)."""
        pp, turns = self._group.size(), len(self._parts)
        # Where stages go round the ranks, fewer microbatches than ranks are under way: a send may wait for its
        # receiver, and with one more all ranks could wait for each other.
        together = len(batch) if turns == 1 or self._rule.v_shaped else pp - 1
        return [y for i in range(0, len(batch), together) for y in self._outputs_of_some(batch[i : i + together])]

    def _outputs_of_some(self, batch: Sequence[Microbatch]) -> list[Tensor]:
        found = list[Tensor]()
        local: dict[int, list[Tensor]] = {}
        sending: list[tuple[dist.Work | None, Tensor]] = []  # a tensor must live until it has left
        for stage, part in sorted(self._parts.items()):
            for i, micro in enumerate(batch):
                x = self._input(stage, i, micro, local)
                y = part(x, micro.targets_BT, micro.positions_BT, micro.documents, **micro.extras())
                if part.stage.last:
                    found.append(y)
                elif stage + 1 in self._parts:
                    local.setdefault(stage + 1, []).append(y)
                else:
                    sending.append((dist.isend(y, group=self._group, group_dst=self._rank_of(stage + 1)), y))
        for work, _ in sending:
            if work is not None:
                work.wait()
        return found

    def _input(self, stage: int, i: int, micro: Microbatch, local: dict[int, list[Tensor]]) -> Tensor:
        if stage == 0:
            return micro.tokens_BT
        if stage in local:
            return local[stage][i]
        x = torch.empty(self._hidden, dtype=self._parts[stage].compute_dtype, device=micro.tokens_BT.device)
        dist.recv(x, group=self._group, group_src=self._rank_of(stage - 1))
        return x

    def _rank_of(self, stage: int) -> int:
        pp = self._group.size()
        return 2 * pp - 1 - stage if self._rule.v_shaped and stage >= pp else stage % pp

    def _run(self, batch: Sequence[Microbatch]) -> Tensor:
        targets = torch.cat([micro.targets_BT for micro in batch])
        positions = torch.cat([micro.positions_BT for micro in batch])
        tokens = (torch.cat([micro.tokens_BT for micro in batch]),) if 0 in self._parts else ()
        losses: list[Tensor] = []
        self._documents = [micro.documents for micro in batch]
        # The last stage computes the loss itself, in chunks, so it needs the targets in its forward.
        keywords: dict[str, Any] = {"targets_BT": targets, "positions_BT": positions}
        if (some := batch[0].sequences) is not None:
            parts = [micro.sequences or some for micro in batch]
            keywords["sequences"] = Sequences(*(torch.cat(part) for part in zip(*parts, strict=True)))
        if (further := [micro.further_BTn2 for micro in batch if micro.further_BTn2 is not None]) and self._has_last:
            keywords["further_BTn2"] = torch.cat(further)
        if keys := [micro.mask_keys_BT for micro in batch if micro.mask_keys_BT is not None]:
            keywords["mask_keys_BT"] = torch.cat(keys)
        target = targets if self._has_last else None
        self._schedule(len(batch)).step(*tokens, **keywords, target=target, losses=losses, return_outputs=False)
        if not losses:
            return torch.zeros((), device=targets.device)
        return torch.stack([loss.detach() for loss in losses]).sum() / self._scale

    def _with_documents(self, part: Decoder, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Add a microbatch's documents, of which each has as many as it has: torch cuts the others' keywords itself.

        Which microbatch it is, is where its positions lie among those of all.
        """
        if len(args) > 1:
            return None  # `outputs` gives them
        positions_BT = keywords["positions_BT"]
        number = positions_BT.storage_offset() // positions_BT.numel()
        return args, {**keywords, "documents": self._documents[number]}

    def _schedule(self, microbatches: int) -> PipelineScheduleSingle | PipelineScheduleMulti:
        from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

        if microbatches not in self._schedules:
            kind = get_schedule_class(self._rule.torch_name)
            several = issubclass(kind, PipelineScheduleMulti)
            stages = self._stages if several else self._stages[0]
            schedule = kind(stages, microbatches, loss_fn=self._loss, scale_grads=False)
            self._schedules[microbatches] = schedule
        return self._schedules[microbatches]

    def _loss(self, summed_loss: Tensor, _: Tensor) -> Tensor:
        return summed_loss * self._scale


def _await_backward(part: Decoder, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    """Let faults strike when the schedule begins a backward: when the gradient of a part's output is there."""
    if output.requires_grad:
        output.register_hook(lambda _: fault("backward"))
