"""A small model that has learned two conversations by heart, as a Hugging Face folder with a chat template."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer

from argosy.config.model import ModelConfig
from argosy.data.chat_template import CHATML, ChatTemplate
from argosy.data.tokenizer import train
from argosy.models import hf
from argosy.models.decoder import Decoder
from argosy.models.initialize import materialize

LEARNED = [
    [("user", "hi"), ("assistant", "hello there"), ("user", "more"), ("assistant", "Größe 🙂 is all")],
    [("system", "be brief"), ("user", "hi"), ("assistant", "yo")],
]
STEPS = 120


def messages(*said: tuple[str, str]) -> list[dict[str, str]]:
    """Return messages as JSON has them."""
    return [{"role": role, "content": content} for role, content in said]


def make_talker(folder: Path) -> Path:
    """Write the model to `folder`. Its turns end with a special token that is not the end of a document."""
    made = folder.with_name(f"{folder.name}-tokenizer.json")
    train([content for said in LEARNED for _, content in said] * 3 + [CHATML], 300, made)
    engine = Tokenizer.from_file(str(made))
    engine.add_special_tokens([AddedToken(name, special=True) for name in ("<|im_start|>", "<|im_end|>")])
    engine.save(str(made))
    template = ChatTemplate(CHATML, {}, "chatml")
    rows = [engine.encode(template.render(messages(*said)), add_special_tokens=False).ids for said in LEARNED]
    length = max(map(len, rows))
    tokens = torch.tensor([row + [0] * (length - len(row)) for row in rows])
    config = ModelConfig(
        layers=2, width=64, heads=2, kv_heads=2, head_width=32, ffn_width=128, max_seq_len=96, tie_embeddings=True,
        vocab_size=engine.get_vocab_size(),
    )  # fmt: skip
    model = Decoder(config)
    materialize(model, config, torch.device("cpu"), 0)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for _ in range(STEPS):
        logits = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.05, f"it has not learned them: {loss}"
    usage = {"chat_template.jinja": CHATML.encode(), "tokenizer_config.json": json.dumps({}).encode()}
    end = engine.token_to_id("<|endoftext|>")
    hf.export_folder(config, model.state_dict(), folder, dtype=torch.float32, tokenizer=made, eod_id=end, usage=usage)
    return folder
