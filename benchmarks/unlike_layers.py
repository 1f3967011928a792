"""The layer description's price: a dense Llama beside another checkout, compilations, and windows by sequence length.

    python benchmarks/unlike_layers.py --other ../before/src    # a checkout from before the description
    python benchmarks/unlike_layers.py                          # without the pair

step       whole optimizer steps of a small dense Llama, eager, this checkout and the other one in turns: ratios of wall
           time and of the process's CPU time within each round. The latter holds on a busy machine too.
compiled   graphs that torch.compile makes for a model's blocks, by the number of layers and of kinds of layers
window     CPU time of a block's forward and backward, with a window and without, by sequence length
"""

from __future__ import annotations

import json
import os
import platform
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
import tyro

from argosy.config.model import ModelConfig
from argosy.models.decoder import Decoder
from argosy.models.initialize import materialize
from contenders import Setting
from train_step import Contender

KINDS = {
    "full": {},
    "sliding, full": {"layers": ["sliding", "full"], "window": 32},
    "sliding, full; heads by kind": {"layers": ["sliding", "full"], "window": 32, "heads": [4, 8], "kv_heads": [2, 4]},
}
WINDOW = 128
SMALL = Setting(layers=4, width=128, ffn_width=256, vocab_size=512, seq_len=128, batch=2, threads=1)
"""So small that the host, which the description would burden, takes most of an eager step."""


@dataclass
class Options:
    setting: tyro.conf.OmitArgPrefixes[Setting] = field(default_factory=lambda: SMALL)
    other: Path | None = None
    """The `src` of another checkout."""
    rounds: int = 16
    """Turns of each checkout."""
    steps: int = 30
    """Optimizer steps of a turn."""
    seq_lens: tuple[int, ...] = (512, 1024, 2048, 4096)
    """Sequence lengths of windowed blocks."""
    repeats: int = 3
    """Measurements of each block; the least counts."""


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    torch.set_num_threads(1)
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; torch "
          f"{torch.__version__}, Python {platform.python_version()}")  # fmt: skip
    if options.other is not None:
        print(json.dumps(steps_of_both(options), indent=1))
    print(json.dumps({name: compilations(attention) for name, attention in KINDS.items()}))
    for name, window in (("window", WINDOW), ("full", 0)):
        print(name, json.dumps({n: round(block_cpu_s(n, window, options.repeats), 4) for n in options.seq_lens}))


def steps_of_both(options: Options) -> dict[str, object]:
    """Return the other checkout's time of a step over ours, medians over the rounds: 1 is as fast, more is faster."""
    ours, theirs = "argosy-eager", f"argosy-eager@{options.other}"
    ratios: dict[str, list[float]] = {"wall": [], "cpu": []}
    with tempfile.TemporaryDirectory() as cache:
        both = {name: Contender(name, options.setting, Path(cache)) for name in (ours, theirs)}
        for contender in both.values():
            contender.turn(2)
        for round_ in range(options.rounds):
            order = (ours, theirs) if round_ % 2 else (theirs, ours)
            wall: dict[str, float] = {}
            cpu: dict[str, float] = {}
            for name in order:
                before = both[name].cpu_s()
                wall[name] = sum(both[name].turn(options.steps)["seconds"])
                cpu[name] = both[name].cpu_s() - before
            for kind, each in (("wall", wall), ("cpu", cpu)):
                ratios[kind].append(each[theirs] / each[ours])
        for contender in both.values():
            contender.leave()
    quarter = options.rounds // 4
    found: dict[str, object] = {}
    for kind, of_rounds in ratios.items():
        ordered = sorted(of_rounds)
        found[kind] = round(median(of_rounds), 4)
        found[f"{kind}, quartiles"] = (round(ordered[quarter], 4), round(ordered[-1 - quarter], 4))
    return found


def compilations(attention: dict[str, object]) -> dict[int, int]:
    """Return the graphs that compiling the blocks makes, by the number of layers."""
    found: dict[int, int] = {}
    for layers in (2, 4, 8):
        torch.compiler.reset()
        made = 0

        def count(graph: torch.fx.GraphModule, _: object) -> object:
            nonlocal made
            made += 1
            return graph.forward

        model = _decoder(layers, 64, attention)
        for block in model.blocks.values():
            block.compile(backend=count)
        tokens = torch.zeros(2, 64, dtype=torch.int64)
        model(tokens, tokens).backward()
        found[layers] = made
    return found


def block_cpu_s(seq_len: int, window: int, repeats: int) -> float:
    """Return the CPU seconds of attention's forward and backward in one layer."""
    model = _decoder(1, 256, {"layers": ["sliding"], "window": window} if window else {})
    attention: Any = model.blocks["0"].attention
    x = torch.randn(1, seq_len, 256, requires_grad=True)
    rotary = next(iter(model.places_to(seq_len, x.device).values()))
    places = tuple(part[None, :seq_len] for part in rotary)
    took = []
    for _ in range(repeats + 1):
        began = time.process_time()
        attention(x, places, None).sum().backward()
        took.append(time.process_time() - began)
    return min(took[1:])


def _decoder(layers: int, width: int, attention: dict[str, object]) -> Decoder:
    sizes = {"heads": 4, "kv_heads": 4, "head_width": width // 4, "ffn_width": 2 * width, "vocab_size": 64}
    config = ModelConfig.model_validate({"layers": layers, "width": width, **sizes, "attention": attention})
    model = Decoder(config)
    materialize(model, config, torch.device("cpu"), 0)
    return model


if __name__ == "__main__":
    main()
