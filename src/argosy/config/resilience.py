"""The run file's table `resilience`: how failures are detected, and what is done about them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, field_validator

from argosy.config.section import Section


class ResilienceConfig(Section):
    """Detection of failures, and recovery from them."""

    node_check_s: NonNegativeFloat = 0.5
    """Duration of the node health check, before a machine takes part in the run and when a rank on it is in doubt:
    products whose bits are known, memory, speed, on all its cores and GPUs at once; 0 checks nothing."""
    grace_s: PositiveFloat = 60.0
    """Time to save the state after SIGTERM, SIGINT or SIGUSR1; then processes are killed."""
    wait_for_nodes_s: NonNegativeFloat = 60.0
    """Time to wait for a lost node before the run goes on without it, under another plan."""
    coordinator_timeout_s: PositiveFloat = 600.0
    """Time that an agent tries to reach a lost coordinator, and that a new run waits for all its nodes."""
    hang_s: NonNegativeFloat = 0.0
    """A rank that the others have waited for this long is killed and replaced; 0: ten median steps, at least 30 s."""
    heartbeat_timeout_s: PositiveFloat = 10.0
    """A process without a heartbeat for this long, stopped or holding Python's lock, is killed and replaced."""
    first_step_s: PositiveFloat = 600.0
    """Longest time for what may compile or wait for a disk: first steps, recovery, saving."""
    straggler_factor: Annotated[float, Field(gt=1.0)] = 1.5
    """A step is slow on a rank if its own work takes this many times as long as its peers'."""
    straggler_steps: PositiveInt = 20
    """A rank that is always slow is reported after this many steps; one that is often slow, within ten times that."""
    straggler_s: NonNegativeFloat = 10.0
    """Least time that those steps span: shorter slowness is no reason to act."""
    on_bad_step: Literal["skip", "rewind", "stop"] = "skip"
    """A step whose loss or gradient norm is not finite, or an outlier, changes nothing, and its samples are skipped.
    rewind: after `rewind_after` in a row the run also goes back to its newest checkpoint; stop: the first ends it."""
    rewind_after: PositiveInt = 3
    """Bad steps in a row after which on_bad_step = "rewind" goes back to a checkpoint."""
    spike_window: PositiveInt = 128
    """Number of past steps whose median, and median distance from it, a loss and a gradient norm are compared with."""
    spike_warmup_steps: PositiveInt = 64
    """First steps of the run, and of each of data.stages, of which only those that are not finite are bad."""
    loss_spike_sigmas: NonNegativeFloat = 10.0
    """A loss this many standard deviations above the median is a spike; 0 turns this off."""
    norm_outlier_sigmas: NonNegativeFloat = 15.0
    """A gradient norm whose logarithm is this many standard deviations above the median is an outlier; 0: off."""
    fingerprint_every_steps: NonNegativeInt = 1
    """Steps between comparisons of the replicas of weights and optimizer state, by fingerprints; 0: never."""
    replay_check_every_steps: NonNegativeInt = 0
    """Steps between replay checks: other replicas compute one replica's loss and gradient again, and compare the bits;
    0 makes none."""
    check_collectives: bool = False
    """Check the gradient all-reduces with checksums that travel beside them (not under zero = 3)."""
    memory_checkpoint_every_steps: NonNegativeInt | Literal["auto"] = "auto"
    """Steps between in-memory checkpoints of a state that has parts without a replica on another node; 0 makes none;
    auto: the interval that costs least, by the measured cost of one and the devices' rate of failures."""
    migrate: bool = True
    """Leave a slow node out, or take another plan where a link became slow, if the planner says that it pays; false
    only reports them."""

    rebalance: bool = False
    """Deal microbatches out to data-parallel replicas by their measured speed, if that saves a twentieth of a step, and
    layers to pipeline stages, if that saves a tenth. The order in which gradients are summed then depends on measured
    times, and losses do not repeat to the bit."""

    @field_validator("memory_checkpoint_every_steps", mode="before")
    @classmethod
    def _is_auto_or_steps(cls, value: object) -> object:
        if value != "auto" and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
            raise ValueError('must be "auto", or a whole number of steps (0 makes none)')
        return value
