"""The sizes of a rank's work: the memory model and the step model share them.

The shapes are those of one microbatch on one rank. All sizes are estimates from the model's dimensions, without
padding, norms and biases, for one plan or for columns of plans. `plan.cost.exact_state` counts the state of one rank of
one plan to the byte.
"""

from __future__ import annotations

import numpy as np

from argosy.plan.cost.rates import System
from argosy.plan.layouts import Layouts
from argosy.plan.workload import Numbers, Workload


class RankSizes:
    """Sizes on one rank of each plan, for one workload or for as many as there are plans."""

    def __init__(self, plans: Layouts, work: Workload, system: System):
        self.plans, self.work, self.system = plans, work, system
        of_portion = work.global_batch / (plans.portions * plans.microbatch)
        self.microbatches = np.maximum(1, of_portion * plans.most_portions)
        """Microbatches in a step, on the data-parallel rank that runs most."""
        self.tokens = plans.microbatch * work.seq_len / plans.cp
        """Tokens of a microbatch, on each context-parallel rank."""
        self.activation_bytes = np.where(plans.is_("precision", "fp32"), 4.0, 2.0)
        """Bytes of one activation."""
        self.sequence_ranks = np.where(system.sequence_parallel > 0, plans.tp, 1)
        """Ranks that share the tokens between matrices."""
        self.expert_tp = np.where(system.whole_experts > 0, 1, plans.tp)
        """Tensor-parallel ranks that share each expert."""

    @property
    def hidden_bytes(self) -> Numbers:
        """Bytes of a microbatch's hidden states on one rank, between matrices."""
        return self.tokens * self.work.width / self.sequence_ranks * self.activation_bytes

    def parameters(self, layers: Numbers) -> tuple[Numbers, Numbers]:
        """Return the parameters on a rank that holds `layers` layers: outside routed experts, and in routed experts.

        Tensor and expert parallelism have cut them; data-parallel ranks may share the rest (ZeRO).
        """
        plans, work = self.plans, self.work
        moe = work.moe_layers / work.layers
        whole = work.tp_replicated_parameters
        dense = work.attention_parameters + (1 - moe) * work.ffn_parameters + moe * work.router_and_shared_parameters
        experts = layers * moe * work.expert_parameters / plans.ep / self.expert_tp
        return layers * ((dense - whole) / plans.tp + whole), experts
