"""What follows from a plan's keys, in arithmetic that serves one plan (`plan.plan`) and columns of plans alike
(`plan.layouts`): +, *, // and comparisons, and no `if`.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from argosy.plan.integers import lowest

NumberT = TypeVar("NumberT")
"""int of a `Plan`, an array of `Layouts`."""


class Quantities(Generic[NumberT]):
    """Quantities of a plan, or of each of many. `numbers` and `fixed_stages` are what differs between these two."""

    @property
    def dp(self: Any) -> NumberT:
        """Data-parallel ranks; each reads other samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def world_size(self: Any) -> NumberT:
        """Processes that the plan needs."""
        return self.pp * self.dp * self.cp * self.tp

    @property
    def stages_here(self: Any) -> NumberT:
        """Pipeline stages on each rank; 1 without a pipeline."""
        fixed = self.fixed_stages
        return 1 + (self.pp > 1) * (fixed + (fixed == 0) * self.stages_per_rank - 1)

    @property
    def stages(self: Any) -> NumberT:
        """Pipeline stages in all."""
        return self.pp * self.stages_here

    @property
    def shares_state(self: Any) -> NumberT:
        """Ranks that share one copy of the state (the n of ZeRO); 1 for stage 0."""
        return 1 + (self.zero > 0) * (self.dp_shard * self.cp - 1)

    @property
    def replicas(self: Any) -> NumberT:
        """Replicas of the state: with stage 0 all ranks that share a model otherwise."""
        return self.dp * self.cp // self.shares_state

    @property
    def shards_parameters(self: Any) -> Any:
        """True if FSDP2 splits the parameters; a rank alone has nothing to share."""
        return (self.zero == 3) & (self.dp_shard * self.cp > 1)

    @property
    def portions(self: Any) -> NumberT:
        """Equal portions that a batch is dealt out in; with `shares`, a data-parallel rank takes several."""
        found = self.dp
        for is_said, numbers in self.numbers("shares"):
            block = self.dp // len(numbers)
            found = found + is_said * (sum(lowest(numbers)) * (block + (block == 0)) - found)
        return found

    @property
    def most_portions(self: Any) -> NumberT:
        """Portions of the data-parallel rank that takes most."""
        found = self.dp // self.dp
        for is_said, numbers in self.numbers("shares"):
            found = found + is_said * (max(lowest(numbers)) - 1)
        return found

    def microbatches(self: Any, global_batch: int) -> NumberT:
        """Return the microbatches that a data-parallel rank runs in a step; with `shares`, the rank that runs most."""
        return global_batch // (self.portions * self.microbatch) * self.most_portions
