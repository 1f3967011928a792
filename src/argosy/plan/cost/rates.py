"""The speed of devices and the habits of software, as numbers: the cost model's view of a cluster and of a trainer."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from argosy.plan.cost.fabric import Fabric
from argosy.plan.cost.muon import HiddenMatrices
from argosy.plan.cost.traffic import KV_GRADIENT_BYTES
from argosy.plan.hardware.clusters import Cluster
from argosy.plan.hardware.devices import Device, Format
from argosy.plan.workload import Numbers

EVERYWHERE = 1 << 40
"""Devices of a site, where there is one only: more than any cluster has."""
SLOWEST_DECIDES = (
    *("memory_bytes", "memory_bytes_per_s", "reduction_gain"),
    *("host_link_bytes_per_s", "host_memory_bytes_per_s", "host_memory_bytes"),
)
"""Rates of a cluster that are those of its slowest devices."""


@dataclass(frozen=True)
class Rates:
    """One device and its links. FLOP/s are dense and from the data sheet; bandwidths are for one direction."""

    fp32: Numbers
    """FLOP/s of fp32 matmuls (TF32 if the device has it)."""
    half: Numbers
    """FLOP/s of bf16 and fp16 matmuls."""
    narrow: Numbers
    """FLOP/s of the plan's narrow format; fp8 by default."""
    achieved_fp32: Numbers
    """Share of each that large matmuls reach in a loop of their own."""
    achieved_half: Numbers
    achieved_narrow: Numbers
    memory_bytes: Numbers
    memory_bytes_per_s: Numbers
    link_bytes_per_s: Numbers
    """Bandwidth of a device to the others in its node or domain, in a large ring."""
    nic_bytes_per_s: Numbers
    """Bandwidth of a device to other nodes: its share of the node's adapters."""
    node: Numbers
    """Devices that the fast link joins."""
    link_latency_s: Numbers = 2e-6
    """Latency of a message between two of them."""
    reduction_gain: Numbers = 1.0
    """Bandwidth of an all-reduce inside a node whose switch sums (NVLS), over that of a ring."""
    host_link_bytes_per_s: Numbers = 32e9
    """Bandwidth of a device to its host's memory."""
    host_memory_bytes_per_s: Numbers = 50e9
    """Share of one device in the bandwidth of that memory."""
    host_memory_bytes: Numbers = np.inf
    """Share of one device in that memory."""
    host_waits: Numbers = 0.0
    """1 if the host itself computes (CPUs), so that its time to start operations is added."""
    site: Numbers = EVERYWHERE
    """Devices of a site, or of the smallest; other sites are behind a thin link."""
    far_bytes_per_s: Numbers = np.inf
    """Share of a device in that link, if all devices of a site send at once."""
    far_latency_s: Numbers = 0.0
    """Latency of that link, one way."""
    fabric: Fabric | None = None
    """Topology of the nodes, if the cluster's file has it; then the first tier outside the node is not used."""

    @classmethod
    def of_device(cls, device: Device, narrow: Format = "fp8", nic_bytes_per_s: float | None = None) -> Rates:
        """Return the rates of a device in a network of which it has `nic_bytes_per_s`; by default its typical share.

        A format that the device has no matmuls for takes the rate of the next wider one, which is what runs there.
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
            link_latency_s=device.link_latency_s,
            reduction_gain=(device.nvls_busbw_bytes_per_s or ring) / ring,
            host_link_bytes_per_s=device.memory_bytes_per_s if is_cpu else device.host_link_bytes_per_s,
            host_memory_bytes_per_s=device.memory_bytes_per_s if is_cpu else device.host_memory_bytes_per_s,
            host_memory_bytes=device.host_memory_bytes or np.inf,
            host_waits=float(is_cpu),
        )

    @classmethod
    def of(cls, cluster: Cluster, narrow: Format = "fp8") -> Rates:
        """Return the rates of every device of a cluster for a plan that deals work out evenly: the slowest of each.

        Three levels of the network are kept: the node, the first tier outside, and the thinnest link between sites. A
        ring enters and leaves a unit of a farther tier once, so that its thin links carry few of all rings. Groups that
        exchange all with all (experts) beyond the first tier are predicted too fast. With a topology all levels count.
        """
        network = cluster.tiers[1] if len(cluster.tiers) > 1 else None
        kinds = [cls.of_device(group.device, narrow) for group in cluster.groups]
        links = [
            kind.link_bytes_per_s * group.link_bytes_per_s / group.device.link_bytes_per_s
            for kind, group in zip(kinds, cluster.groups, strict=True)
        ]
        adapter = min(group.nic_bytes_per_s for group in cluster.groups)
        first = adapter if network is None or cluster.topology is not None else network.bytes_per_s
        slowest: dict[str, Numbers] = {name: min(getattr(kind, name) for kind in kinds) for name in SLOWEST_DECIDES}
        return replace(
            cls.of_device(cluster.device, narrow),
            **slowest,
            link_bytes_per_s=min(links),
            nic_bytes_per_s=first,
            node=cluster.devices_per_node,
            fabric=Fabric.of(cluster, min(links)),
            **_between_sites(cluster),
        )


def _between_sites(cluster: Cluster) -> dict[str, Numbers]:
    if not cluster.links:
        return {}
    far = cluster.tiers[-1]
    site = min(cluster.sites.values())
    return {"site": site, "far_bytes_per_s": far.bytes_per_s, "far_latency_s": far.latency_s}


@dataclass(frozen=True)
class System:
    """The habits of the software that runs a plan. The defaults are those of Argosy."""

    flash: Numbers = 1
    """1: attention is tiled; 0: scores are matrices in memory, and all of them are computed."""
    attention: Numbers = 1
    """Speed of the software's tiled attention over the best kernels for the device."""
    sequence_parallel: Numbers = 1
    """1: between matrices, tensor-parallel ranks share the tokens."""
    balanced_stages: Numbers = 1
    """1: layers are dealt to stages by cost; 0: each stage has as many."""
    whole_experts: Numbers = 0
    """1: tensor-parallel ranks have whole experts for a share of the tokens; 0: a share of each expert."""
    sends_once: Numbers = 0
    """1: a token that goes to several experts of a node crosses the network once (DeepEP)."""
    deals_experts: Numbers = 0
    """1: ranks that share the state of experts have whole ones, some perhaps none; 0: each has as much."""
    even_experts: Numbers = 0
    """1: tokens are dealt to experts evenly, as benchmarks do, whatever the router says."""
    launched: Numbers = 1
    """Share of the kernels of a layer with experts that the host launches one by one, not as CUDA graphs."""
    weight_bytes: Numbers = 4
    """Bytes of a weight that ranks share (ZeRO)."""
    gradient_bytes: Numbers = 4
    gradient_buffers: Numbers = 0
    """1: gradients have their memory for the whole run, not only from their layer's backward on."""
    checks_gradients: Numbers = 0
    """1: from time to time gradients are computed a second time while the first ones are held."""
    moment_bytes: Numbers = 8
    """Bytes of the optimizer's state for a weight, master copy included."""
    ends_moment_bytes: Numbers = 0
    """More of these bytes for a weight of embedding or head, which Muon leaves to AdamW."""
    hidden: tuple[HiddenMatrices, ...] = ()
    """Matrices that Muon makes orthogonal; none with other optimizers."""
    direction_bytes: Numbers = 2
    """Bytes of one of their numbers while it does, and in its results."""
    widened_bytes: Numbers = 0
    """Bytes of a weight's moments while an update has them in fp32, if they are kept in fewer."""
    update_bytes: Numbers = 0
    """Bytes that the optimizer's step needs for each weight that it updates: copies of gradients, results."""
    reduced_bytes: Numbers = 4
    """Bytes of a gradient on the wire."""
    ring_gradient_bytes: Numbers = KV_GRADIENT_BYTES
    """Bytes of a gradient of keys and values that travels round a ring of context parallelism."""
    updated_bytes: Numbers = 4
    """Bytes of an updated weight on the wire (ZeRO 1 and 2)."""
    kept_widths: Numbers = 2
    """Hidden-state widths that a layer keeps for backward, beside the inputs and outputs of both norms."""
    selective: Numbers = 0
    """Share of a layer's activations that selective recompute keeps; 0: the results of matmuls and attention."""
    saves_here: Numbers = 0
    """1: the copies that are made for a checkpoint lie in the device's own memory, which on a CPU is the host's."""
    receives_ahead: Numbers = 1
    """1: pipeline stages have a buffer for each microbatch that they receive (torch.distributed.pipelining)."""
    gathers_again: Numbers = 0
    """1: tensor-parallel ranks gather again in backward what they gathered in forward, and do not keep it."""
    whole_logits: Numbers = 0
    """Bytes kept for each logit of a microbatch; 0: the loss is computed in chunks."""
    chunk_rows: Numbers = 0
    """Tokens of such a chunk at least."""
    dropout: Numbers = 0
    """1: dropout masks are drawn and kept."""
    fused: Numbers = 1
    """1: pointwise operations run as few kernels (compiled, or written so)."""
    sums_once: Numbers = 1
    """1: with ZeRO 3, gradients of several microbatches add up on the rank and are summed over ranks once."""
    gathers: Numbers = 1
    """Collectives in which ZeRO 3 gathers a layer: one, or one for each parameter."""
    gathers_recomputed: Numbers = 0
    """1: a recomputed layer is gathered for that too, beside forward and backward."""
    overlaps_gradients: Numbers = 1
    """1: gradients are summed, and parameters gathered, while other layers compute."""
    buckets: int = 0
    """1: with ZeRO 0 to 2 gradients travel in buckets of `bucket_mb`; 0: in messages of whatever size is best."""
    copies_sums: Numbers = 0
    """1: a reduce-scatter makes a copy of its whole message (gloo)."""
    keeps_root: Numbers = 1
    """1: with ZeRO 3, embedding and head stay gathered from their first use to the end of a microbatch's backward."""
    gathers_ahead: Numbers = 0
    """1: with ZeRO 1 and 2 updated values travel under the next forward, each layer waiting for its own."""
    overlaps_experts: Numbers = 0
    """1: tokens travel to experts while other microbatches compute (DualPipe)."""
    computes_shared_meanwhile: Numbers = 0
    """1: shared experts are computed while a microbatch's first tokens are on their way to the others."""
    overlaps_tensor: Numbers = 0
    """1: tensor-parallel collectives run under matmuls (asynchronous TP)."""


def in_precision(precision: Numbers, fp32: Numbers, half: Numbers, narrow: Numbers) -> Numbers:
    """Return the figure for a plan's precision (0 fp32, 1 and 2 bf16 and fp16, from 3 on fp8)."""
    return np.where(precision == 0, fp32, np.where(precision >= 3, narrow, half))
