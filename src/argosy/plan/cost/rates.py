"""What the devices and the software can do, as numbers: the cost model's view of a cluster and of a trainer."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from argosy.plan.hardware.clusters import Cluster
from argosy.plan.hardware.devices import Device, Format
from argosy.plan.workload import Numbers


@dataclass(frozen=True)
class Rates:
    """One device and its links. FLOP/s are those of the data sheet, dense; bandwidths are of one direction."""

    fp32: Numbers
    """FLOP/s of fp32 matmuls (TF32 where the device has it)."""
    half: Numbers
    """FLOP/s of bf16 and fp16 matmuls."""
    narrow: Numbers
    """FLOP/s of the plan's narrow format, fp8 unless said otherwise."""
    achieved_fp32: Numbers
    """Of each, the share that large matmuls reach in a loop of their own."""
    achieved_half: Numbers
    achieved_narrow: Numbers
    memory_bytes: Numbers
    memory_bytes_per_s: Numbers
    link_bytes_per_s: Numbers
    """Of a device to others in its node or domain, in a large ring."""
    nic_bytes_per_s: Numbers
    """Of a device to other nodes: the node's adapters, shared out."""
    node: Numbers
    """Devices that the fast link joins."""
    reduction_gain: Numbers = 1.0
    """All-reduce inside a node, where the switch adds up (NVLS): its bandwidth over that of a ring."""
    host_link_bytes_per_s: Numbers = 32e9
    """Of a device to its host's memory."""
    host_memory_bytes_per_s: Numbers = 50e9
    """Of that memory, the share of one device."""
    host_waits: Numbers = 0.0
    """1: the host computes itself, so that its time for starting operations comes on top (CPUs)."""

    @classmethod
    def of_device(cls, device: Device, narrow: Format = "fp8", nic_bytes_per_s: float | None = None) -> Rates:
        """Those of a device in a network of which it has `nic_bytes_per_s`, its typical share unless said otherwise.

        A format that the device has no matmuls for takes the rate of the next wider one: it is what runs there.
        """
        half: Format = "bf16" if "bf16" in device.formats else "fp16" if "fp16" in device.formats else "fp32"
        full: Format = "fp32" if "fp32" in device.formats else half
        small: Format = narrow if narrow in device.formats else half
        ring, is_cpu = device.ring_bytes_per_s, device.kind == "cpu"
        return cls(
            fp32=device.peak(full),
            half=device.peak(half),
            narrow=device.peak(small),
            achieved_fp32=device.efficiency(full),
            achieved_half=device.efficiency(half),
            achieved_narrow=device.efficiency(small),
            memory_bytes=device.usable_bytes,
            memory_bytes_per_s=device.memory_bytes_per_s,
            link_bytes_per_s=ring,
            nic_bytes_per_s=nic_bytes_per_s or device.nic_bytes_per_s,
            node=device.devices_per_node,
            reduction_gain=(device.nvls_busbw_bytes_per_s or ring) / ring,
            host_link_bytes_per_s=device.memory_bytes_per_s if is_cpu else device.host_link_bytes_per_s,
            host_memory_bytes_per_s=device.memory_bytes_per_s if is_cpu else device.host_memory_bytes_per_s,
            host_waits=float(is_cpu),
        )

    @classmethod
    def of(cls, cluster: Cluster, narrow: Format = "fp8") -> Rates:
        """Those of every device of a cluster, as a plan that deals work out evenly sees them: the slowest of each.

        Of the network this keeps two levels, the node and the first tier outside. A ring enters and leaves a unit of
        a farther tier once, so that its thin links carry few of all rings; groups that exchange all with all
        (experts) beyond the first tier are predicted too fast, and links between sites are not in it: they are
        `plan.cost.sites`.
        """
        network = cluster.tiers[1] if len(cluster.tiers) > 1 else None
        kinds = [cls.of_device(group.device, narrow) for group in cluster.groups]
        links = [
            kind.link_bytes_per_s * group.link_bytes_per_s / group.device.link_bytes_per_s
            for kind, group in zip(kinds, cluster.groups, strict=True)
        ]
        return replace(
            cls.of_device(cluster.device, narrow),
            memory_bytes=min(kind.memory_bytes for kind in kinds),
            memory_bytes_per_s=min(kind.memory_bytes_per_s for kind in kinds),
            link_bytes_per_s=min(links),
            nic_bytes_per_s=network.bytes_per_s if network else min(g.nic_bytes_per_s for g in cluster.groups),
            node=cluster.devices_per_node,
            reduction_gain=min(kind.reduction_gain for kind in kinds),
            host_link_bytes_per_s=min(kind.host_link_bytes_per_s for kind in kinds),
            host_memory_bytes_per_s=min(kind.host_memory_bytes_per_s for kind in kinds),
        )


@dataclass(frozen=True)
class System:
    """How the software that runs a plan does it. The defaults are Argosy."""

    flash: Numbers = 1
    """1: attention in tiles; 0: scores are matrices in memory, and all of them are computed."""
    attention: Numbers = 1
    """Speed of its tiled attention over the best kernels for the device."""
    sequence_parallel: Numbers = 1
    """1: between matrices, tensor-parallel ranks share the tokens."""
    balanced_stages: Numbers = 1
    """1: layers are dealt to stages by cost; 0: as many to each."""
    whole_experts: Numbers = 0
    """1: tensor-parallel ranks have whole experts for a share of the tokens; 0: a share of each expert."""
    sends_once: Numbers = 0
    """1: a token that goes to several experts of a node crosses the network once (DeepEP)."""
    even_experts: Numbers = 0
    """1: tokens are dealt to experts evenly, as benchmarks do, whatever the router says."""
    launched: Numbers = 1
    """Of the kernels of a layer with experts, the share that the host launches one by one, and not as CUDA graphs."""
    weight_bytes: Numbers = 4
    """Of a weight that ranks share (ZeRO)."""
    gradient_bytes: Numbers = 4
    gradient_buffers: Numbers = 0
    """1: gradients have their memory for the whole run, and not only from their layer's backward on."""
    checks_gradients: Numbers = 0
    """1: now and then gradients are computed a second time while the first are held."""
    moment_bytes: Numbers = 8
    """Of the optimizer's state for a weight, master copy included."""
    update_bytes: Numbers = 0
    """What the optimizer's step needs besides for each weight that it updates: copies of gradients, results."""
    reduced_bytes: Numbers = 4
    """Of a gradient on the wire."""
    updated_bytes: Numbers = 4
    """Of an updated weight on the wire (ZeRO 1 and 2)."""
    kept_widths: Numbers = 2
    """Hidden-state widths that a layer keeps for backward beside both norms' inputs and outputs."""
    selective: Numbers = 0
    """Share of a layer's activations that selective recompute keeps; 0: what matmuls and attention give."""
    receives_ahead: Numbers = 1
    """1: pipeline stages have a buffer for each microbatch that they receive (torch.distributed.pipelining)."""
    gathers_again: Numbers = 0
    """1: what tensor-parallel ranks gather in forward they gather again in backward, and do not keep."""
    whole_logits: Numbers = 0
    """Bytes kept for each logit of a microbatch; 0: the loss is computed in chunks."""
    dropout: Numbers = 0
    """1: masks are drawn and kept."""
    fused: Numbers = 1
    """1: pointwise operations run as few kernels (compiled, or written so)."""
    sums_once: Numbers = 1
    """1: with ZeRO 3, gradients of several microbatches add up on the rank and are summed over ranks once."""
    gathers: Numbers = 1
    """Collectives in which ZeRO 3 gathers a layer: one, or one for each parameter."""
    gathers_recomputed: Numbers = 0
    """1: a layer that is recomputed is gathered for that too, beside forward and backward."""
    overlaps_gradients: Numbers = 1
    """1: gradients are summed, and parameters gathered, while other layers compute."""
    overlaps_experts: Numbers = 0
    """1: tokens travel to experts while other microbatches compute (DualPipe)."""
    overlaps_tensor: Numbers = 0
    """1: tensor-parallel collectives run under matmuls (asynchronous TP)."""


def in_precision(precision: Numbers, fp32: Numbers, half: Numbers, narrow: Numbers) -> Numbers:
    """Of three figures, that of a plan's precision (0 fp32, 1 and 2 bf16 and fp16, 3 fp8)."""
    return np.where(precision == 0, fp32, np.where(precision == 3, narrow, half))
