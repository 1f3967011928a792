"""The measurements of `argosy probe` beyond a device's few figures: tables that calibration starts from.

Rates are those of one device (on CPUs of one process) while all devices of the probe do the same.
"""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from argosy.config.section import Section
from argosy.plan.sync import Compressed

Operation = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]


class MatmulRate(Section):
    """A matmul [m, k] x [k, n]."""

    m: PositiveInt
    """Rows; in forward, the tokens."""
    k: PositiveInt
    """Length of the sums; for a weight's gradient, the tokens."""
    n: PositiveInt
    """Columns."""
    kind: Literal["square", "forward", "input_gradient", "weight_gradient"]
    """One of a layer's three matmuls, as they differ in layout; square: none of them."""
    number_format: Literal["fp32", "bf16", "fp16"]
    """Format of both factors and of the product."""
    flops_per_s: PositiveFloat
    """2 m k n over its time."""


class AttentionRate(Section):
    """Causal attention of whole rows."""

    seq_len: PositiveInt
    """Tokens of a row."""
    heads: PositiveInt
    """Number of query heads."""
    head_width: PositiveInt
    """Width of one head."""
    number_format: Literal["fp32", "bf16", "fp16"]
    """Format of queries, keys and values."""
    forward_flops_per_s: PositiveFloat
    """2 heads seq_len^2 head_width a row (the causal half of both matmuls) over its time."""
    backward_flops_per_s: PositiveFloat
    """Twice as many FLOPs over the time of backward."""


class CollectiveRate(Section):
    """The time of a collective: latency_s + message / bytes_per_s, for messages from `from_bytes` up to the next row's.

    The message of an all-gather or reduce-scatter is the whole, of which each rank has a share. For an all-reduce or
    all-to-all it is what each rank has. In a send, each rank sends it to the next one.
    """

    operation: Operation
    """Kind of collective."""
    tier: str
    """The network that it crosses, as in `Cluster.tiers`: node, network."""
    ranks: PositiveInt
    """Ranks in a group."""
    groups: PositiveInt
    """Groups in a node that ran at once and shared its links."""
    from_bytes: NonNegativeInt
    """Smallest message that the row applies to."""
    latency_s: NonNegativeFloat
    """Time of a message without bytes."""
    bytes_per_s: PositiveFloat | None = None
    """Rate for the message, not for the bytes on the wire; none: its size makes no difference yet."""


class CompressionRate(Section):
    """The work of one way to sum in fewer bytes."""

    sync: Compressed
    """The plan's word."""
    number_s: PositiveFloat
    """Seconds to compress and restore a number of a bucket of 4 MiB, in a group of one rank."""


class Measurements(Section):
    """All measurements of a probe; empty where it measured nothing."""

    date: str = ""
    """Date of the probe."""
    host: str = ""
    """Name of the machine; of the first one if there were several."""
    site: str = ""
    """Site of the machine, where several are joined; `argosy probe --site` writes it."""
    memory_copy_bytes_per_s: PositiveFloat | None = None
    """Rate of a large copy, bytes read and bytes written both counted."""
    launch_s: PositiveFloat | None = None
    """Time of the host for one small operation."""
    layer_host_s: PositiveFloat | None = None
    """Time of the host for forward and backward of one dense layer: a lower bound, whatever the sizes."""
    disk_write_bytes_per_s: PositiveFloat | None = None
    """Rate at which all processes together write a file each, until the data is on the disk."""
    disk_read_bytes_per_s: PositiveFloat | None = None
    """Rate at which all processes together read the same files."""
    loader_tokens_per_s: PositiveFloat | None = None
    """Rate of one process's loader, alone."""
    matmuls: tuple[MatmulRate, ...] = ()
    attention: tuple[AttentionRate, ...] = ()
    collectives: tuple[CollectiveRate, ...] = ()
    compression: tuple[CompressionRate, ...] = ()


def four_digits(value: float) -> float:
    """Round a measurement: further digits say nothing."""
    return float(f"{value:.4g}")
