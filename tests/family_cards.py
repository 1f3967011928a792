"""A card for each family: how far a drawn model here is from the same one in transformers, and what comes through.

python tests/family_cards.py 8 2             draw 8 configurations of each family, 2 of them also under plans of two
                                             processes; write docs/families.json and the table
python tests/family_cards.py 8 2 llama phi3  only of these; the others' cards stay
"""

from __future__ import annotations

import json
import os
import random
import re
import sys
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from argosy.config.model import ModelConfig
from argosy.models import hf
from argosy.models.decoder import Decoder
from argosy.models.delta_net import GatedDeltaNet
from argosy.models.experts import moe_layers
from argosy.models.microbatch import document_positions
from argosy.parallel.world import World
from argosy.plan.layer_spec import DELTA_CHUNK, layer_spec
from argosy.plan.parameters import parameters
from argosy.plan.workload import Workload
from drawn_families import DRAWN, Draw, draw_config, random_model
from families_in_worlds import END_OF_DOCUMENT, STEPS, by_transformers, errors, plans_of, under_plan, under_plans
from tiny import eager
from workers import WorkerPool

SEQ_LEN = 40
DOCS = Path(__file__).parents[1] / "docs"
Card = dict[str, float]
"""logits, gradients, packed, cache: the largest error, relative to the largest number; config, weights: 1 if all came
through bit for bit; index: 1 if it says what the files hold; parameters, flops: those counted over those that the
planner says."""


def card_of(family: str, draw: Draw) -> Card:
    """Return the card of one drawn configuration."""
    config = draw_config(family, draw)
    theirs = random_model(config)
    with TemporaryDirectory() as made:
        scratch = Path(made)
        save_theirs(family, theirs, scratch / "theirs")
        ours = load_ours(scratch / "theirs")
        hf.export_folder(ours.config, ours.state_dict(), scratch / "back", dtype=torch.float32)
        stored, returned = tensors(scratch / "theirs"), tensors(scratch / "back")
        same = stored.keys() == returned.keys() and all(torch.equal(stored[n], returned[n]) for n in stored)
        tokens = torch.randint(3, config.vocab_size, (2, SEQ_LEN), generator=torch.Generator().manual_seed(1))
        return {
            "config": float(hf.import_config(scratch / "back") == ours.config),
            "weights": float(same),
            "index": float(index_is_right(ours, stored, scratch / "shards")),
            "parameters": sum(p.numel() for p in ours.parameters()) / parameters(ours.config),
            "flops": counted_flops(ours, tokens) / expected_flops(ours.config, tokens),
            **_packed_and_cached(ours, tokens),
            **_against(ours, theirs, tokens, scratch),
        }


def index_is_right(ours: Decoder, stored: Mapping[str, Tensor], folder: Path) -> bool:
    """Export in many files. Return True if the index names each tensor's file, and what they hold is `stored`."""
    largest = max(parameter.nbytes for parameter in ours.parameters())
    with mock.patch.object(hf, "SHARD_BYTES", largest):
        hf.export_folder(ours.config, ours.state_dict(), folder, dtype=torch.float32)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = {path.name: load_file(path) for path in folder.glob("*.safetensors")}
    held = {name: file for file, some in files.items() for name in some}
    size = sum(tensor.nbytes for some in files.values() for tensor in some.values())
    whole = all(torch.equal(files[file][name], stored[name]) for name, file in held.items())
    return len(files) > 1 and index == {"metadata": {"total_size": size}, "weight_map": held} and whole


def counted_flops(ours: Decoder, tokens: Tensor) -> int:
    """Return the FLOPs of a forward and backward, as torch counts them, without those of delta-nets computed again."""
    delta_nets = [module for module in ours.modules() if isinstance(module, GatedDeltaNet)]
    for net in delta_nets:
        net.recomputes = False
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        ours(tokens, tokens).backward()
    for net in delta_nets:
        net.recomputes = True
    ours.zero_grad()
    return counter.get_total_flops()


def expected_flops(config: ModelConfig, tokens: Tensor) -> float:
    """Return what `counted_flops` is by the planner's formula, and what that leaves out: in attention the masked half,
    the padding of narrow values and scores that are computed again; in delta-nets the filling of the last chunk; and
    adding up what several experts found."""
    work = Workload.of_model(config, SEQ_LEN, len(tokens))
    attention = 0.0
    for layer in range(config.layers):
        spec, settings = layer_spec(config, layer), config.attention
        width = config.mla.key_width if config.mla.kv_rank else spec.core_width
        in_blocks = spec.window or settings.softcap or spec.has_sinks
        seen = spec.seen(SEQ_LEN)
        if spec.is_chunked:  # torch counts their mean
            seen = tokens.numel() // (len(tokens) * -(-SEQ_LEN // seen))
        attention += (3.5 if in_blocks else 3) * 4 * spec.heads * width * seen
    several = work.experts_per_token > 1 and config.moe.weigh == "results"
    added_up = 6 * work.moe_layers * work.experts_per_token * work.width * several
    delta = work.delta_layers * (3 * work.delta_flops_per_token + work.delta_solve_flops_per_token)
    in_chunks = len(tokens) * -(-SEQ_LEN // DELTA_CHUNK) * DELTA_CHUNK
    return tokens.numel() * (sum(work.matmul_flops_per_token) + attention + added_up) + in_chunks * delta


def card_under_plans(family: str, draw: Draw, workers: WorkerPool, steps: int = STEPS) -> dict[str, Card]:
    """Return the errors of one drawn configuration in one process, and under each plan of two that it can have."""
    config = draw_config(family, draw)
    theirs = random_model(config)
    with TemporaryDirectory() as made:
        scratch = Path(made)
        folder = scratch / "theirs"
        save_theirs(family, theirs, folder)
        plans = plans_of(hf.import_config(folder))
        found = workers.run(2, under_plans, folder, plans, steps)
        alone = under_plan(World(), folder, eager("microbatch=4"), steps)
        expected = by_transformers(theirs, lambda model: _gradients_as_ours(model, scratch / "gradients"), steps)
    cards = {name: errors([rank[name] for rank in found], expected) for name in plans}
    return {"one process": errors([alone], expected), **cards}


def plannable(family: str, seed: int) -> Draw:
    """Return draws of a configuration that can have a plan of tensor parallelism: two ranks can share its heads."""
    for again in count():
        key = f"{family}/{seed}/{again}"
        config = draw_config(family, random.Random(key).choice)
        if config.num_attention_heads > 1 and getattr(config, "linear_num_key_heads", 2) % 2 == 0:
            return random.Random(key).choice
    raise AssertionError


def _gradients_as_ours(model: Any, folder: Path) -> dict[str, Tensor]:
    """Return the gradients of a model of transformers by our names."""
    kept = [parameter.detach().clone() for parameter in model.parameters()]
    _put_gradients(model)
    model.save_pretrained(folder)
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), kept, strict=True):
            parameter.copy_(value)
    return dict(hf.import_folder(folder)[1])


@torch.no_grad()
def _put_gradients(model: Any) -> None:
    """Put a model's gradients in the place of its weights."""
    for parameter in model.parameters():
        parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)


def _packed_and_cached(ours: Decoder, tokens: Tensor) -> Card:
    packed = tokens.clone()
    packed[:, [0, 11, 30]] = END_OF_DOCUMENT
    with torch.no_grad():
        together = ours(packed, positions_BT=document_positions(packed, END_OF_DOCUMENT))
        alone = torch.cat([ours(part) for part in packed.split([11, 19, 10], 1)], 1)
        cache = ours.new_cache(SEQ_LEN)
        stepwise = torch.cat([ours(part, cache=cache) for part in tokens.split([13, 1, 1, 20, 5], 1)], 1)
        return {"packed": error(together, alone), "cache": error(stepwise, ours(tokens))}


def _against(ours: Decoder, theirs: Any, tokens: Tensor, folder: Path) -> Card:
    """Compare logits and the gradients of a step; both models hold the gradients afterwards."""
    targets = torch.randint(tokens.max(), tokens.shape, generator=torch.Generator().manual_seed(2))
    their_logits = theirs(tokens).logits
    with torch.no_grad():
        logits = error(ours(tokens), their_logits)
    for layer in moe_layers(ours):
        layer.loss_weight = 0.0  # the losses that balance experts are not part of theirs
    ours(tokens, targets).backward()
    torch.nn.functional.cross_entropy(their_logits.flatten(0, 1), targets.flatten(), reduction="sum").backward()
    _put_gradients(ours)
    _put_gradients(theirs)
    hf.export_folder(ours.config, ours.state_dict(), folder / "ours-gradients", dtype=torch.float32)
    theirs.save_pretrained(folder / "their-gradients")
    found, expected = tensors(folder / "ours-gradients"), tensors(folder / "their-gradients")
    names = [name for name in expected if not name.endswith(("e_score_correction_bias", "layer_scalar"))]
    largest = max(float(expected[name].abs().max()) for name in names)
    return {
        "logits": logits,
        "gradients": max(float((found[name] - expected[name]).abs().max()) for name in names) / largest,
    }


def error(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference over the largest number."""
    return float((found - expected).abs().max() / expected.abs().max())


def save_theirs(family: str, model: Any, folder: Path) -> None:
    """Save a model of transformers as one of `family`."""
    model.save_pretrained(folder)
    if family == "kimi_k2":  # a class of its own only by its name
        config = folder / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": family}))


def load_ours(folder: Path) -> Decoder:
    """Return the model in a Hugging Face folder."""
    config, weights = hf.import_folder(folder)
    model = Decoder(config)
    model.to_empty(device="cpu")
    model.load_state_dict(dict(weights))
    return model


def tensors(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of a small Hugging Face folder."""
    return load_file(folder / "model.safetensors")


def worst(cards: list[Card]) -> Card:
    """Return the worst of each figure."""
    ratios, flags = ("parameters", "flops"), ("config", "weights", "index")

    def of(name: str) -> float:
        values = [card[name] for card in cards if name in card]
        return max(values, key=lambda v: abs(v - 1)) if name in ratios else (min if name in flags else max)(values)

    return {name: of(name) for name in {name: None for card in cards for name in card}}


ERRORS, FLAGS, RATIOS = (
    ("logits", "gradients", "packed", "cache"),
    ("config", "weights", "index"),
    ("parameters", "flops"),
)


def table(cards: dict[str, Card], under: dict[str, dict[str, Card]]) -> str:
    """Return the cards as a table: the largest error of each family in one process and under plans, and what differs.

    The column of what differs is left out if nothing does.
    """
    rows = [["model_type", "one process", "under plans", "differs"], ["---"] * 4]
    for family, card in cards.items():
        largest = (max(card[name] for name in ERRORS), max(worst(list(under[family].values())).values()))
        differs = [f"**{name}**" for name in FLAGS if not card[name]]
        differs += [f"**{name}** x {card[name]:.6f}" for name in RATIOS if abs(card[name] - 1) >= 1e-9]
        rows.append([f"`{family}`", *(f"{value:.0e}" for value in largest), ", ".join(differs)])
    if not any(cells[-1] for cells in rows[2:]):
        rows = [cells[:-1] for cells in rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in rows)


def main(draws: int, planned: int, families: Sequence[str]) -> None:
    """Write the cards of these families, by default of all."""
    torch.set_num_threads(1)
    cards, under, workers = dict[str, Card](), dict[str, dict[str, Card]](), WorkerPool()
    if families:
        before = json.loads((DOCS / "families.json").read_text())
        cards, under = before["cards"], before["under_plans"]
    for family in families or DRAWN:
        cards[family] = worst([card_of(family, random.Random(f"{family}/{i}").choice) for i in range(draws)])
        each = [card_under_plans(family, plannable(family, i), workers) for i in range(planned)]
        under[family] = {name: worst([card[name] for card in each if name in card]) for card in each for name in card}
        print(family, cards[family], under[family], flush=True)
    workers.close()
    cards, under = ({family: some[family] for family in DRAWN if family in some} for some in (cards, under))  # type: ignore[assignment]
    record = {"draws": draws, "cards": cards, "draws_under_plans": planned, "under_plans": under}
    (DOCS / "families.json").write_text(json.dumps(record, indent=1) + "\n")
    page = DOCS / "families.md"
    whole = f"<!-- cards -->\n{table(cards, under)}\n<!-- cards -->"
    page.write_text(re.sub("<!-- cards -->.*<!-- cards -->", whole, page.read_text(), flags=re.S))


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
