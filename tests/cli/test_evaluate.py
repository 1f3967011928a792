from __future__ import annotations

import pytest

from argosy.cli import evaluate
from argosy.errors import UserError


@pytest.mark.parametrize("option", ["--data data", "--split train", "--max-tokens 500"])
def test_tasks_take_no_options_of_held_out_text(tmp_path, option):
    with pytest.raises(UserError, match="--data, --split and --max-tokens are for held-out text"):
        evaluate.main([str(tmp_path), "--tasks", "mine.yaml", *option.split()])
