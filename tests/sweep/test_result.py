"""The plot is an SVG that shows each trial with a metric in a panel for each parameter."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

from argosy.sweep.load import load_sweep
from argosy.sweep.result import plot
from argosy.sweep.study import Trial

SVG = "{http://www.w3.org/2000/svg}"


def test_each_trial_with_a_metric_is_a_dot_inside_of_each_panel(tmp_path: Path) -> None:
    path = tmp_path / "a&b.toml"
    path.write_text(
        'name = "s"\n[parameters]\noptimizer.lr = { min = 1e-4, max = 1e-1, log = true }\n'
        "optimizer.kind = ['adamw', 'lion']\ntrain.global_batch = [8, 16, 512]\n[run.train]\nsteps = 9\n"
    )
    values = [
        {"optimizer.lr": 1e-4, "optimizer.kind": "adamw", "train.global_batch": 8},
        {"optimizer.lr": 1e-1, "optimizer.kind": "lion", "train.global_batch": 512},
        {"optimizer.lr": 1e-2, "optimizer.kind": "lion", "train.global_batch": 16},
    ]
    trials = [
        Trial(0, values[0], "done", 3.0),
        Trial(1, values[1], "stopped", 4.0),
        Trial(2, values[2], "failed", None, reason="diverged"),
    ]
    root = ElementTree.fromstring(plot(load_sweep(path), trials, trials[0]))
    panels = root.findall(f"{SVG}g")
    assert len(panels) == 1 + 3
    for panel in panels:
        dots = panel.findall(f"{SVG}circle")
        assert len(dots) == 2 and all(0 < float(dot.attrib["cx"]) < 300 for dot in dots)
        low, high = (float(dot.attrib["cy"]) for dot in sorted(dots, key=lambda dot: "trial 0001" in dot[0].text))  # type: ignore[operator]
        assert low > high  # the less the metric, the further down
    assert "not promoted" in ElementTree.tostring(root).decode()


def test_a_sweep_without_results_has_a_plot_as_well(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    path.write_text("[parameters]\nseed = [1, 2]\n[run.train]\nsteps = 9\n")
    ElementTree.fromstring(plot(load_sweep(path), [], None))
