"""The matrix of faults: conversations, preferences and adapters outlive what text does."""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from argosy.config.data import PrepareConfig
from argosy.data.prepare import prepare
from argosy.models import hf
from tiny import decoder

SEQ_LEN = 128
PLAN = "dp_shard=2,zero=1,microbatch=2"
CASES = {
    "sft": ("sft", ()),
    "dpo": ("dpo", ()),
    "lora": ("sft", ("--lora.rank", "4")),
}


@pytest.fixture(scope="module")
def options(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[str, ...]]:
    """Return the options of a case: its data, which are prepared, and the weights that it starts from."""
    folder = tmp_path_factory.mktemp("tuning")
    model = decoder()
    hf.export_folder(model.config, model.state_dict(), folder / "hf", dtype=torch.float32)

    def of(case: str) -> tuple[str, ...]:
        objective, more = CASES[case]
        lines = [
            {"prompt": f"{n}?", "completion": f"{2 * n}", "chosen": f"{2 * n}", "rejected": "no"} for n in range(400)
        ]
        (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, lines)))
        prepare(
            PrepareConfig(
                input=(str(folder / "chats.jsonl"),),
                out=folder / objective,
                tokenizer=corpus / "tokenizer.json",
                chat_template="chatml",
                objective=objective,  # type: ignore[arg-type]
                seq_len=SEQ_LEN,
                processes=1,
            )
        )
        of_data = ("--data.sources", str(folder / objective), "1.0", "--data.seq-len", str(SEQ_LEN))
        return ("--train.objective", objective, *of_data, "--model.weights", str(folder / "hf"), *more)

    return of


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_tuning_run_killed_at_random_ends_bit_for_bit(disturbed, undisturbed, options, case):
    """Processes of either rank, and the command with all of its processes, which is given again."""
    chance, given = random.Random(case), options(case)
    run = disturbed(PLAN, "slow@forward:seconds=0.1", *given, "--launch.max_restarts", "10")
    run.wait_for_step(4)  # there is something to go back to
    for whom in chance.sample(["worker", "worker", "command"], 3):
        run.wait_for_step(run.steps() + chance.randrange(1, 4))
        if whom == "command":
            run.kill_and_start_again()
        else:
            known = len(run.events("recovered"))
            run.send(chance.randrange(2), signal.SIGKILL)
            run.wait_until(lambda known=known: len(run.events("recovered")) > known)
    run.end().check(undisturbed(PLAN, *given), "worker_died")
