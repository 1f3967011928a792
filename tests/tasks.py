"""Tasks of lm-eval in files, over data in files."""

from __future__ import annotations

import json
from pathlib import Path

ANSWERS = ["import", " return None", " class", " self"]
CHOICES = "  - metric: acc\n  - metric: acc_norm\ndoc_to_choice: choices\ndoc_to_target: answer\n"
"""The end of a task of multiple choice."""
TASK = """\
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: {kind}
doc_to_text: "{{{{question}}}}"
metric_list:
"""


def task_file(folder: Path, name: str, kind: str, more: str) -> Path:
    """A task over twelve questions, in a file of its own; more: its metrics, and what comes after them."""
    data = folder / "questions.jsonl"
    lines = [{"question": f"def f{i}():" + " x" * i, "choices": ANSWERS, "answer": i % 4} for i in range(12)]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    file = folder / f"{name}.yaml"
    file.write_text(TASK.format(name=name, kind=kind, data=data) + more)
    return file
