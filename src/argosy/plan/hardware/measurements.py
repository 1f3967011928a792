"""What `argosy probe` measures of a cluster beyond its devices' few figures: the tables that calibration starts from.

Rates are those of one device (of a CPU one process) while all devices of the probe do the same.
"""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from argosy.config.schema import Section

Operation = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]


class MatmulRate(Section):
    """A matmul [m, k] x [k, n]."""

    m: PositiveInt
    """Rows; in forward the tokens."""
    k: PositiveInt
    """What is summed over; for a weight's gradient the tokens."""
    n: PositiveInt
    """Columns."""
    kind: Literal["square", "forward", "input_gradient", "weight_gradient"]
    """Which of a layer's three matmuls it is: they differ in layout; square: none of a layer."""
    number_format: Literal["fp32", "bf16", "fp16"]
    """Of both factors and the product."""
    flops_per_s: PositiveFloat
    """2 m k n over its time."""


class AttentionRate(Section):
    """Causal attention of whole rows."""

    seq_len: PositiveInt
    """Tokens of a row."""
    heads: PositiveInt
    """Query heads."""
    head_width: PositiveInt
    """Width of one."""
    number_format: Literal["fp32", "bf16", "fp16"]
    """Of queries, keys and values."""
    forward_flops_per_s: PositiveFloat
    """2 heads seq_len^2 head_width a row (the causal half of both matmuls) over its time."""
    backward_flops_per_s: PositiveFloat
    """Twice as many FLOPs over the time of backward."""


class CollectiveRate(Section):
    """A collective takes latency_s + message / bytes_per_s, for messages from `from_bytes` up to the next row's.

    The message of an all-gather or reduce-scatter is the whole, of which each rank has a share; of an all-reduce or
    all-to-all it is what each rank has; in a send each rank sends it to the next one.
    """

    operation: Operation
    """What is done."""
    tier: str
    """The network that it crosses, as in `Cluster.tiers`: node, network."""
    ranks: PositiveInt
    """Of a group."""
    groups: PositiveInt
    """Groups in a node that did it at once and shared its links."""
    from_bytes: NonNegativeInt
    """Smallest message that the row is for."""
    latency_s: NonNegativeFloat
    """Of a message without bytes."""
    bytes_per_s: PositiveFloat | None = None
    """Of the message, not of the bytes on the wire; left out: its size makes no difference yet."""


class Measurements(Section):
    """All that a probe measured; empty where there was none."""

    date: str = ""
    """When."""
    host: str = ""
    """Name of the machine, of several the first."""
    memory_copy_bytes_per_s: PositiveFloat | None = None
    """Read and written by a large copy, both counted."""
    launch_s: PositiveFloat | None = None
    """Of the host, for one small operation."""
    layer_host_s: PositiveFloat | None = None
    """Of the host, for forward and backward of one dense layer: its floor, whatever the sizes."""
    disk_write_bytes_per_s: PositiveFloat | None = None
    """All processes together, each a file of its own, until the disk has it."""
    disk_read_bytes_per_s: PositiveFloat | None = None
    """The same files, all processes together."""
    loader_tokens_per_s: PositiveFloat | None = None
    """Of one process's loader, alone."""
    matmuls: tuple[MatmulRate, ...] = ()
    attention: tuple[AttentionRate, ...] = ()
    collectives: tuple[CollectiveRate, ...] = ()
