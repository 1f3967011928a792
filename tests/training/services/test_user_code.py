"""Callbacks and metrics are called at their points, and none can break a run unnoticed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from argosy.errors import RunFailed
from argosy.observe.events import Metrics
from argosy.parallel.world import World
from argosy.training.step import StepOutcome
from argosy.training.trainer import Trainer
from run_folder import events
from tiny import EAGER, eager, losses, run_config, train_in

HEAD = "import math\nimport torch\nfrom argosy import extend\n\n"


def code(folder: Path, text: str) -> dict[str, Any]:
    """The table `extend` of a run with this code."""
    path = folder / "mine.py"
    path.write_text(HEAD + text)
    return {"files": (path,)}


def do_step(trainer: Trainer) -> StepOutcome:
    steps = trainer.remaining_steps()
    outcome = trainer.exchange(trainer.forward_backward(trainer.batch(next(steps))))
    trainer.update(outcome)
    trainer.observe()
    steps.close()
    return outcome


def test_each_point_is_called_in_order_with_what_is_known_there(corpus, tmp_path):
    note = (
        "    with open('{}', 'a') as f: f.write(f'{} {{run.step}} {{run.loss:.1f}} {{len(run.gradients()) > 0}}\\n')\n"
    )
    points = ["start", "before_step", "after_backward", "after_exchange", "after_step", "evaluate", "save", "end"]
    text = "".join(
        f"@extend.callback('{point}')\ndef at_{point}(run: extend.Run):\n{note.format(tmp_path / 'calls', point)}"
        for point in points
    )
    run = run_config(
        corpus,
        extend=code(tmp_path, text),
        train={"steps": 1},
        checkpoint={"every_steps": 1},
        evaluate={"every_steps": 1},
    )
    records = train_in(World(), run, EAGER, tmp_path / "run")
    loss = f"{losses(records)[0]:.1f}"
    assert (tmp_path / "calls").read_text().splitlines() == [
        "start 0 nan False",
        "before_step 0 nan False",
        "after_backward 0 nan False",
        f"after_exchange 0 {loss} True",
        f"after_step 0 {loss} False",
        f"evaluate 0 {loss} False",
        f"save 0 {loss} False",
        f"end 0 {loss} False",
    ]


def test_the_last_checkpoint_is_a_save_too(corpus, tmp_path):
    text = f"@extend.callback('save')\ndef f(run):\n    with open('{tmp_path / 'saves'}', 'a') as f: f.write('.')\n"
    text += "    run.log(saved=run.step)\n"
    run = run_config(corpus, extend=code(tmp_path, text), train={"steps": 2}, evaluate={"every_steps": 0})
    train_in(World(), run, EAGER, tmp_path / "run")
    assert (tmp_path / "saves").read_text() == "."
    (end,) = events(tmp_path / "run", "end")
    assert end["user"] == {"saved": 1.0}


def test_what_is_logged_is_in_the_line_of_its_step_and_its_time_is_counted(trainer, tmp_path):
    logs = "run.log(a=run.step, b=torch.tensor(2.5))\n    run.log(a=7, **{'self': 3})"
    text = f"@extend.callback('after_step')\ndef f(run):\n    {logs}"
    made = trainer(extend=code(tmp_path, text))
    do_step(made)
    (record,) = Metrics(tmp_path).read()
    assert record["user"] == {"a": 7.0, "b": 2.5, "self": 3.0}
    assert record["seconds"]["user"] > 0
    assert sum(v for k, v in record["seconds"].items() if k != "step") == pytest.approx(
        record["seconds"]["step"], abs=1e-5
    )


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("raise RuntimeError('no')", "RuntimeError: no"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("run.log(x='much')", "TypeError: run.log(x=...) takes a number, not 'much'"),
        ("run.log(**{str(i): i for i in range(2000)})", "ValueError: run.log got more than 1000 names"),
        ("run.step = 3", "AttributeError"),
    ],
)
def test_a_callback_that_raises_is_switched_off_and_the_run_goes_on(trainer, tmp_path, body, why):
    text = f"@extend.callback('before_step')\ndef f(run):\n    {body}\n"
    made = trainer(extend=code(tmp_path, text))
    do_step(made)
    do_step(made)
    (event,) = events(tmp_path, "user_code_off")
    assert event["why"].startswith(why)
    assert event["place"].endswith("mine.py:7")
    assert made.state.step == 2


def test_a_strict_callback_that_raises_ends_the_run_with_its_name(trainer, tmp_path):
    made = trainer(extend=code(tmp_path, "@extend.callback('after_step', strict=True)\ndef guard(run):\n    1 / 0\n"))
    with pytest.raises(RunFailed, match=r"mine.py:7: the callback guard raised ZeroDivisionError.* at step 0"):
        do_step(made)


def test_a_metric_that_gives_text_is_switched_off_and_one_that_gives_nan_is_left_out(trainer, tmp_path):
    text = (
        "@extend.metric('words')\ndef f(run): return 'many'\n"
        "@extend.metric('sometimes')\ndef g(run): return math.nan if run.step == 0 else 2\n"
    )
    made = trainer(extend=code(tmp_path, text))
    do_step(made)
    do_step(made)
    assert [record.get("user") for record in Metrics(tmp_path).read()] == [None, {"sometimes": 2.0}]
    assert [event["what"] for event in events(tmp_path, "user_code_off")] == ["metric words"]
    assert [event["did"] for event in events(tmp_path, "user_code")] == ["gave nan, which is left out"]


def test_random_numbers_and_settings_are_put_back_and_that_is_said_once(trainer, tmp_path):
    text = (
        "@extend.callback('before_step')\ndef f(run):\n    torch.rand(3)\n    torch.set_default_dtype(torch.float64)\n"
        "    torch.set_float32_matmul_precision('medium')\n"
    )
    made = trainer(extend=code(tmp_path, text))
    before = torch.get_rng_state()
    do_step(made)
    do_step(made)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_default_dtype() is torch.float32 and torch.get_float32_matmul_precision() == "highest"
    (event,) = events(tmp_path, "user_code")
    assert event["did"] == "changed torch's random numbers and settings of torch, which were put back"


def test_metrics_stand_beside_as_many_names_as_may_be_logged(trainer, tmp_path):
    made = trainer(
        extend=code(
            tmp_path,
            "@extend.metric('one')\ndef f(run): return 1\n"
            "@extend.callback('before_step')\ndef g(run): run.log(**{str(i): i for i in range(1000)})\n",
        )
    )
    do_step(made)
    (record,) = Metrics(tmp_path).read()
    assert len(record["user"]) == 1001 and record["user"]["one"] == 1.0
    assert not events(tmp_path, "user_code_off")


@pytest.mark.parametrize(
    ("point", "body"),
    [
        ("after_step", "run.weights()['norm.weight'].mul_(2)"),
        ("after_exchange", "run.gradients()['norm.weight'].zero_()"),
        ("before_step", "run.weights()['norm.weight'].mul_(2); raise ValueError"),
    ],
)
def test_a_callback_that_writes_to_weights_or_gradients_ends_the_run(trainer, tmp_path, point, body):
    made = trainer(extend=code(tmp_path, f"@extend.callback('{point}')\ndef tamper(run):\n    {body}\n"))
    with pytest.raises(RunFailed, match=r"the callback tamper changed the weights or gradients of norm.weight"):
        do_step(made)


def metrics_of_ranks(world: World, plan: str, corpus: Path, folder: Path) -> list[Any]:
    text = (
        "@extend.metric('rank_mean')\ndef f(run): return run.rank\n"
        "@extend.metric('rank_sum', reduce='sum')\ndef g(run): return run.rank\n"
        "@extend.metric('odd')\ndef h(run): return run.rank if run.rank % 2 else math.nan\n"
        "@extend.callback('after_step')\ndef i(run): run.log(mine=run.rank)\n"
    )
    run = run_config(
        corpus, extend=code(folder / str(world.rank), text), train={"steps": 2}, evaluate={"every_steps": 0}
    )
    train_in(world, run, eager(plan), folder / "run")
    return [record["user"] for record in Metrics(folder / "run").read() if "loss" in record]


def test_metrics_are_means_and_sums_over_ranks_and_logged_values_those_of_rank_0(workers, corpus, tmp_path):
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    found = workers.run(2, metrics_of_ranks, "dp_replicate=2", corpus, tmp_path)[0]
    assert found == [{"rank_mean": 0.5, "rank_sum": 1.0, "odd": 1.0, "mine": 0.0}] * 2


def test_a_run_with_callbacks_has_the_losses_of_one_without(corpus, tmp_path):
    text = "@extend.callback('after_exchange')\ndef f(run):\n    torch.rand(9)\n    run.log(g=run.grad_norm)\n"
    plain = train_in(World(), run_config(corpus), EAGER, tmp_path / "plain")
    watched = train_in(World(), run_config(corpus, extend=code(tmp_path, text)), EAGER, tmp_path / "watched")
    assert losses(watched) == losses(plain)
