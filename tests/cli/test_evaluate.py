from __future__ import annotations

import pytest

from argosy.cli import evaluate
from argosy.errors import UserError


@pytest.mark.parametrize("option", ["--data data", "--split train", "--max-tokens 500"])
def test_tasks_take_no_options_of_held_out_text(tmp_path, option):
    with pytest.raises(UserError, match="--data, --split and --max-tokens are for held-out text"):
        evaluate.main([str(tmp_path), "--tasks", "mine.yaml", *option.split()])


@pytest.mark.parametrize("words", ["--seq-len 0", "--seq-len -1", "--max-tokens 0"])
def test_windows_and_tokens_are_at_least_one(words, tmp_path):
    with pytest.raises(UserError, match="--max-tokens and --seq-len must be at least 1"):
        evaluate.main([str(tmp_path), *words.split()])
