"""A card for each family: how far a drawn model here is from the same one in transformers, and what comes through.

python tests/family_cards.py 8      draw 8 configurations of each family; write docs/families.json and the table
"""

from __future__ import annotations

import json
import random
import re
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from argosy.models import hf
from argosy.models.decoder import Decoder, document_positions
from argosy.models.experts import moe_layers
from argosy.plan.workload import parameters
from drawn_families import DRAWN, Draw, draw_config, family_entry, random_model

SEQ_LEN = 40
END_OF_DOCUMENT = 2
DOCS = Path(__file__).parents[1] / "docs"
Card = dict[str, float]
"""logits, gradients, packed, cache: the largest error, relative to the largest number; config, weights: 1 if all came
through bit for bit; parameters: those counted over those that the planner says."""


def card_of(family: str, draw: Draw) -> Card:
    """Return the card of one drawn configuration."""
    config = draw_config(family, draw)
    theirs = random_model(config)
    with TemporaryDirectory() as name:
        folder = Path(name, "theirs")
        save_theirs(family, theirs, folder)
        ours = load_ours(folder)
        back = Path(name, "back")
        hf.export_folder(ours.config, ours.state_dict(), back, dtype=torch.float32)
        stored, returned = tensors(folder), tensors(back)
        same = stored.keys() == returned.keys() and all(torch.equal(stored[n], returned[n]) for n in stored)
        card = {
            "config": float(hf.import_config(back) == ours.config),
            "weights": float(same),
            "parameters": sum(p.numel() for p in ours.parameters()) / parameters(ours.config),
        }
        tokens = torch.randint(3, config.vocab_size, (2, SEQ_LEN), generator=torch.Generator().manual_seed(1))
        card |= _packed_and_cached(ours, tokens)
        card |= _against(ours, theirs, tokens, Path(name))
    return card


def _packed_and_cached(ours: Decoder, tokens: Tensor) -> Card:
    packed = tokens.clone()
    packed[:, [0, 11, 30]] = END_OF_DOCUMENT
    with torch.no_grad():
        together = ours(packed, positions_BT=document_positions(packed, END_OF_DOCUMENT))
        alone = torch.cat([ours(part) for part in packed.split([11, 19, 10], 1)], 1)
        cache = ours.new_cache(len(tokens), SEQ_LEN)
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
    with torch.no_grad():
        for parameter in [*ours.parameters(), *theirs.parameters()]:
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    hf.export_folder(ours.config, ours.state_dict(), folder / "ours-gradients", dtype=torch.float32)
    theirs.save_pretrained(folder / "their-gradients")
    found, expected = tensors(folder / "ours-gradients"), tensors(folder / "their-gradients")
    names = [name for name in expected if not name.endswith("e_score_correction_bias")]
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
    lowest = ("config", "weights")
    return {name: (min if name in lowest else max)(card[name] for card in cards) for name in cards[0]}


def table(cards: dict[str, Card]) -> str:
    """Return the cards as a table."""
    rows = [
        "| model_type | class | logits | gradients | packed | cache | config | weights | parameters |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for family, card in cards.items():
        errors = " | ".join(f"{card[name]:.0e}" for name in ("logits", "gradients", "packed", "cache"))
        whole = " | ".join("same" if card[name] else "**other**" for name in ("config", "weights"))
        counted = "same" if card["parameters"] == 1 else f"{card['parameters']:.6f}"
        rows.append(f"| `{family}` | {family_entry(family).architecture} | {errors} | {whole} | {counted} |")
    return "\n".join(rows)


def main(draws: int) -> None:
    """Write the cards of all families."""
    torch.set_num_threads(1)
    cards = {}
    for family in DRAWN:
        drawn = [card_of(family, random.Random(f"{family}/{i}").choice) for i in range(draws)]
        cards[family] = worst(drawn)
        print(family, cards[family], flush=True)
    (DOCS / "families.json").write_text(json.dumps({"draws": draws, "cards": cards}, indent=1) + "\n")
    page = DOCS / "families.md"
    marks = "<!-- cards -->"
    text = re.sub(f"{marks}.*{marks}", f"{marks}\n{table(cards)}\n{marks}", page.read_text(), flags=re.S)
    page.write_text(text)


if __name__ == "__main__":
    main(int(sys.argv[1]) if sys.argv[1:] else 8)
