"""Write the data of the example in docs/fine-tuning.md to data/sums: sums of two numbers, in three forms.

    python examples/fine-tuning/sums.py

The text has all sums, one after the other: a model of it knows sums, and does not know when to stop. The conversations
answer, half of them in a sentence; the pairs prefer the number alone. Every fifth sum is in neither of them, and is
asked for in the score.
"""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

FOLDER = Path("data/sums")
SUMS = list(itertools.product(range(12), repeat=2))
NEW = SUMS[::5]
KNOWN = [pair for pair in SUMS if pair not in NEW]
ASKED_EACH = 10


def question(a: int, b: int) -> str:
    return f"{a} + {b} ="


def answer(a: int, b: int) -> str:
    return f"{a + b}."


def sentence(a: int, b: int) -> str:
    return f"It is {a + b}."


def lines(pairs: list[tuple[int, int]]) -> str:
    """Return sums as text."""
    return "\n".join(f"{question(*pair)} {answer(*pair)}" for pair in pairs)


def write(name: str, records: list[dict[str, str]]) -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    print(f"{FOLDER / name}.jsonl: {len(records)} lines")


if __name__ == "__main__":
    chance = random.Random(0)
    write("text", [{"text": lines(chance.choices(SUMS, k=24))} for _ in range(1500)])
    asked = chance.choices(KNOWN, k=2000)
    forms = [chance.choice((answer, sentence)) for _ in asked]
    write("chats", [{"prompt": question(*p), "completion": form(*p)} for p, form in zip(asked, forms, strict=True)])
    write("pairs", [{"prompt": question(*p), "chosen": answer(*p), "rejected": sentence(*p)} for p in asked[:500]])
    write("questions", [{"question": question(*pair), "answer": answer(*pair)} for pair in NEW * ASKED_EACH])
