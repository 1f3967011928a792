"""Replicas behind a thin link: seconds a step and bytes at the interfaces, for each way to sum gradients.

    python benchmarks/thin_link.py [--rate 100mbit] [--sites 2] [--steps 6]

Each site is a network namespace whose link to the others is throttled with `tc tbf`; needs root and iproute2. The same
model, batch and processes train with each word of `sync`, and with PyTorch's DDP and its own hooks. Bytes are those
that the interface of site 0 sent, headers and acknowledgements included.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from argosy.config.schema import LaunchConfig, RunConfig
from argosy.models.batch import Microbatch, microbatches
from argosy.models.decoder import Decoder
from argosy.models.initialize import materialize
from argosy.observe.clock import StepClock
from argosy.parallel.apply import apply
from argosy.parallel.world import World, join_world
from argosy.plan.cost.traffic import traffic
from argosy.plan.plan import Plan
from argosy.training.state import TrainState
from argosy.training.step import Step

MODEL = {
    "layers": 6, "width": 320, "heads": 8, "kv_heads": 8, "head_width": 40, "ffn_width": 896, "vocab_size": 4096,
}  # fmt: skip
ROWS, TOKENS = 2, 64
WAYS = ["exact", "bf16", "int8", "int4", "powersgd", "topk", "randomk", "sign"]
HOOKS = ["ddp", "ddp fp16", "ddp powersgd"]
CORE, ADDRESS = "thin-core", "10.77.0.{}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--sites", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--ways", default=",".join(WAYS + HOOKS))
    parser.add_argument("--worker", type=int, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        work(options.worker, options.sites, options.steps, options.ways.split(","))
        return
    if os.geteuid() or not shutil.which("tc") or not shutil.which("ip"):
        sys.exit("skipped: network namespaces need root and iproute2 (Debian: apt-get install iproute2)")
    with sites(options.sites, options.rate):
        command = [sys.executable, __file__, *sys.argv[1:]]
        workers = [
            subprocess.Popen(["ip", "netns", "exec", name(site), *command, "--worker", str(site)])
            for site in range(options.sites)
        ]
        codes = [worker.wait() for worker in workers]
    sys.exit(max(map(abs, codes)))


def name(site: int) -> str:
    return f"thin-{site}"


@contextmanager
def sites(many: int, rate: str) -> Iterator[None]:
    """Namespaces that a bridge joins, with a throttle at both ends of each one's link."""
    spaces = [CORE, *map(name, range(many))]
    for space in spaces:
        if Path("/run/netns", space).exists():  # of a benchmark that was killed
            call(f"ip netns del {space}")
        call(f"ip netns add {space}")
    try:
        call(f"ip -n {CORE} link add br0 type bridge")
        call(f"ip -n {CORE} link set br0 mtu 9000 up")
        for site in range(many):
            space = name(site)
            call(f"ip -n {space} link set lo up")
            call(f"ip -n {space} link add wan mtu 9000 type veth peer name to{site} mtu 9000 netns {CORE}")
            call(f"ip -n {CORE} link set to{site} master br0 up")
            call(f"ip -n {space} addr add {ADDRESS.format(site + 1)}/24 dev wan")
            call(f"ip -n {space} link set wan up")
            for where, link in (space, "wan"), (CORE, f"to{site}"):
                call(f"tc -n {where} qdisc add dev {link} root tbf rate {rate} burst 128kb latency 200ms")
        yield
    finally:
        for space in spaces:
            call(f"ip netns del {space}")


def call(command: str) -> None:
    subprocess.run(command.split(), check=True)


def sent_bytes() -> int:
    return int(Path("/sys/class/net/wan/statistics/tx_bytes").read_text())


def work(rank: int, size: int, steps: int, ways: list[str]) -> None:
    """One site's process: all ways, one after the other."""
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0",
        "MASTER_ADDR": ADDRESS.format(1), "MASTER_PORT": "29501", "GLOO_SOCKET_IFNAME": "wan",
    }  # fmt: skip
    subprocess.run(
        ["mount", "-t", "sysfs", "sysfs", "/sys"], check=False, stderr=subprocess.DEVNULL
    )  # that of this namespace
    world = join_world(LaunchConfig(timeout_s=300.0, threads=1))
    torch.set_num_threads(1)
    lines = []
    for way in ways:
        one_step, predicted = by_hook(world, way) if way.startswith("ddp") else by_sync(world, way)
        one_step()  # the first connects, and warms up
        one_step()
        dist.barrier()
        before, began = sent_bytes(), time.monotonic()
        for _ in range(steps):
            one_step()
        dist.barrier()
        step_s, sent = (time.monotonic() - began) / steps, (sent_bytes() - before) / steps
        lines.append({"way": way, "step_s": step_s, "sent_mb": sent / 1e6, "predicted_mb": predicted / 1e6})
        if world.is_first:
            ratio, speed = lines[0]["sent_mb"] / lines[-1]["sent_mb"], lines[0]["step_s"] / step_s
            off = f"{sent / predicted - 1:+.1%} of the formula" if predicted else ""
            tokens = ROWS * TOKENS * size / step_s
            print(
                f"{way:13} {step_s * 1e3:7.0f} ms  {tokens:7.0f} tokens/s  {sent / 1e6:8.2f} MB  "
                f"{ratio:6.1f} x fewer bytes  {speed:5.2f} x the speed  {off}",
                flush=True,
            )
    if world.is_first:
        print(json.dumps(lines))
    dist.destroy_process_group()


def by_sync(world: World, word: str) -> tuple[Callable[[], None], int]:
    plan = Plan.parse(f"dp_replicate={world.size},microbatch={ROWS},compile=false,sync={word}")
    run = configuration(world)
    step = Step(run, TrainState.begin(apply(plan, run, world), plan, run), world, StepClock(world.device))
    batch = [rows(world)]

    def one_step() -> None:
        step.apply(step.update(step.exchange(step.forward_backward(batch)), 1e-3))

    return one_step, sum(traffic(plan, run, world.rank).values())


def by_hook(world: World, way: str) -> tuple[Callable[[], None], int]:
    run = configuration(world)
    model = Decoder(run.model)
    materialize(model, run.model, world.device, run.seed)
    # PyTorch's PowerSGD sends from callbacks: with several buckets, the order on gloo's ranks differs, and it fails.
    bucket_mb = 1000 if way == "ddp powersgd" else None
    ddp = DistributedDataParallel(model, bucket_cap_mb=bucket_mb)
    if way == "ddp fp16":
        ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    if way == "ddp powersgd":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer, batch = torch.optim.AdamW(ddp.parameters(), fused=True), rows(world)

    def one_step() -> None:
        loss = ddp(batch.tokens_BT, batch.targets_BT, batch.positions_BT, batch.documents)
        (loss / batch.targets_BT.numel()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return one_step, 0


def configuration(world: World) -> RunConfig:
    return RunConfig.model_validate(
        {"model": MODEL, "data": {"seq_len": TOKENS}, "train": {"steps": 100, "global_batch": ROWS * world.size}}
    )


def rows(world: World) -> Microbatch:

    tokens = torch.randint(
        1, MODEL["vocab_size"], (ROWS, TOKENS + 1), generator=torch.Generator().manual_seed(world.rank)
    )
    (batch,) = microbatches(tokens.int().numpy(), ROWS, 0, world.device)
    return batch


if __name__ == "__main__":
    main()
