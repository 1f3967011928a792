"""A sweep file is read whole, and what is wrong in it is named with file and line before anything starts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from argosy.errors import ArgosyWarning, UserError
from argosy.sweep.load import Sweep, load_sweep

RUN = """
[run.train]
steps = 90
[run.model]
heads = 4
"""


def sweep_of(folder: Path, text: str, run: str = RUN) -> Sweep:
    path = folder / "lr.toml"
    path.write_text(text + run)
    return load_sweep(path)


def test_keys_are_nested_or_dotted_and_values_are_those_of_the_schema(tmp_path: Path) -> None:
    text = """
method = "grid"
[parameters]
optimizer.lr = [1, 3e-3]
"train.global_batch" = [8, 16.0]
data.seq_len = { min = 128, max = 512, step = 128 }
model = [{ width = 64 }, { width = 128, layers = 2 }]
"""
    sweep = sweep_of(tmp_path, text)
    assert sweep.config.name == "lr" and sweep.trials == len(sweep.grid) == 2 * 2 * 4 * 2
    assert sweep.grid[1] == {
        "optimizer.lr": 1.0,
        "train.global_batch": 8,
        "data.seq_len": 128,
        "model": {"width": 128, "layers": 2},
    }
    run = sweep.run_of(sweep.grid[-1])
    assert (run.optimizer.lr, run.train.global_batch, run.data.seq_len) == (3e-3, 16, 512)
    assert (run.model.width, run.model.layers, run.train.steps) == (128, 2, 90)


def test_the_run_is_a_file_a_preset_or_a_table(tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_text("[train]\nsteps = 7\n[data]\nsources = { here = 1.0 }\n")
    varied = "[parameters]\nseed = [0, 1]\n"
    from_file = sweep_of(tmp_path, f'run = "my.toml"\n{varied}', "").base
    assert from_file.train.steps == 7 and list(from_file.data.sources) == [str(tmp_path / "here")]
    assert sweep_of(tmp_path, f'run = "demo"\n{varied}', "").base.model.preset == "llama-5m"
    assert sweep_of(tmp_path, varied).base.train.steps == 90


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[parameters]\noptimizer.lrr = [1]", "lr.toml:2: optimizer.lrr: unknown key of a run; did you mean opt"),
        ("[parameters]\nlearning_rate = [1e-3]", "lr.toml:2: learning_rate: unknown key.*here it is optimizer.lr"),
        ("[parameters]\noptimizer.lr = [1e-3, -1]", r"lr.toml:2: optimizer.lr = -1.0: must be a finite number above 0"),
        ("[parameters]\noptimizer.lr = ['fast']", r'lr.toml:2: optimizer.lr = "fast": must be a finite number above 0'),
        ("[parameters]\noptimizer.beta1 = { min = 0.5, max = 1.5 }", "lr.toml:2: optimizer.beta1 = 1.5: must be"),
        ("[parameters]\noptimizer.lr = []", "lr.toml:2: parameters.*values is empty"),
        ("[parameters]\noptimizer.lr = [1e-3, 0.001]", "lr.toml:2: optimizer.lr: the value 0.001 is given twice"),
        ("[parameters]\noptimizer.lr = 3", r"lr.toml:2: parameters.* = 3"),
        ("[parameters]\noptimizer.lr = { min = 2e-3, max = 1e-3 }", "lr.toml:2: .*the range from .* is empty"),
        ("[parameters]\noptimizer.lr = { min = 1e-3 }", "lr.toml:2: .*give a list, or min and max"),
        ("[parameters]\n[parameters.optimizer.lr]\nmin = 0\nmax = 1\nlog = true", "lr.toml:3: .*has no logarithm"),
        ("[parameters]\noptimizer.lr = { mim = 1e-3, max = 1 }", "lr.toml:2: .*unknown key; did you mean min"),
        ("[parameters]\noptimizer.kind = { min = 1, max = 2 }", "lr.toml:2: optimizer.kind takes no numbers"),
        ("[parameters]\ntrain.global_batch = { min = 1.5, max = 8 }", "lr.toml:2: .*min = 1.5 is no whole number"),
        ("[parameters]\nmodel = [{ widht = 64 }]", "lr.toml:2: model.widht = 64: .*did you mean model.width"),
        ("[parameters]\nname = ['a', 'b']", "lr.toml:2: name cannot vary: the sweep names its trials"),
        ("[parameters]\ndata.prepare.vocab_size = [512]", "lr.toml:2: .* cannot vary: prepare each variant"),
        ("method = 'bayes'\n[parameters]\nseed = [1]", 'lr.toml:1: method = "bayes": must be one of "grid"'),
        ("trails = 3\n[parameters]\nseed = [1]", "lr.toml:1: trails = 3: unknown key; did you mean trials"),
        ("metric = 'val_loss'\n[parameters]\nseed = [1]", "lr.toml:1: metric = .*did you mean validation_loss"),
        ("metric = 'tasks.arc.acc'\n[parameters]\nseed = [1]", 'lr.toml:1: metric = .*say direction = "maximize"'),
        ("metric = 'mfu'\n[parameters]\nseed = [1]", 'lr.toml:1: metric = .*say direction = "maximize"'),
        ("method = 'grid'\n[parameters]\noptimizer.lr = { min = 1e-3, max = 1 }", "lr.toml:3: .*no end of values"),
        ("method = 'grid'\n[parameters]\nseed = { min = 0, max = 4e9 }", "lr.toml:1: the grid has more than 2,000"),
        ("method = 'grid'\ntrials = 4\n[parameters]\nseed = [1]", "lr.toml:2: trials = 4: grid knows its"),
        ("method = 'halving'\n[parameters]\ntrain.steps = [5, 9]", "lr.toml:1: .*train.steps must be set"),
        ("method = 'halving'\nhalving.min_steps = 90\n[parameters]\nseed = [1]", "lr.toml:2: halving.min_steps = 90"),
        ("method = 'tpe'\nhalving.eta = 2\n[parameters]\nseed = [1]", r"\[halving\] has no effect"),
        ("method = 'grid'\n[parameters]\nmodel.kv_heads = [2, 3]", "lr.toml:3: kv_heads=3: .*not divide heads = 4"),
        ("trials = 3", "nothing varies"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(UserError) as refused:
        sweep_of(tmp_path, text + "\n")
    assert re.search(said, str(refused.value), re.DOTALL), refused.value


def test_a_run_that_is_missing_or_wrong_is_named(tmp_path: Path) -> None:
    varied = "[parameters]\nseed = [0, 1]\n"
    for text, said in (
        (varied, "run is missing"),
        (f'run = "no.toml"\n{varied}', r'lr.toml:1: run = "no.toml": .*no such run file'),
        (f"{varied}[run.train]\nstep = 3\n", "lr.toml:4: train.step = 3: unknown key; did you mean train.steps"),
        (f"{varied}[[run.sites]]\nname = 'oslo'\n[[run.sites]]\nname = 'lyon'\n", r"its run has \[\[sites\]\]"),
        (f"{varied}[run.launch]\nnodes = 2\n", "lr.toml: launch.nodes = 2 in its run, and a trial is on one"),
    ):
        with pytest.raises(UserError) as refused:
            sweep_of(tmp_path, text, "")
        assert re.search(said, str(refused.value)), refused.value


def test_values_that_go_together_in_some_trials_only_are_no_mistake_of_a_random_sweep(tmp_path: Path) -> None:
    text = "method = 'random'\n[parameters]\nmodel.heads = [4, 6]\nmodel.kv_heads = [4, 6]\n"
    assert sweep_of(tmp_path, text).trials == 20


@pytest.mark.parametrize("metric", ["bits_per_byte", "validation_accuracy", "reward_accuracy", "tasks.arc.acc"])
def test_what_is_learned_may_decide_early(tmp_path: Path, metric: str) -> None:
    text = f"metric = '{metric}'\ndirection = 'maximize'\nmethod = 'halving'\n[parameters]\nseed = [0, 1, 2]\n"
    assert sweep_of(tmp_path, text).config.metric == metric


def test_the_example_is_a_sweep() -> None:
    example = Path(__file__).parents[2] / "examples" / "sweeps" / "learning-rate.toml"
    assert load_sweep(example).config.method == "halving"


def test_a_parameter_that_no_trial_reads_is_told(tmp_path: Path) -> None:
    momenta = "[parameters]\noptimizer.momentum = [0.5, 0.9]\n"
    with pytest.warns(ArgosyWarning, match=r'lr\.toml:2: optimizer\.momentum = 0\.5 has no effect .*\.kind = "adamw"'):
        sweep_of(tmp_path, momenta)
    sweep_of(tmp_path, f'{momenta}optimizer.kind = ["adamw", "muon"]\n')
