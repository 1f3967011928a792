"""Parts of a run that one command starts are commands of their own, which share the cores."""

from __future__ import annotations

import os
from pathlib import Path

from argosy.launch.children import held, started


def test_parts_that_compute_share_the_cores_and_end_as_they_end(tmp_path: Path, capsys) -> None:
    cores = os.sched_getaffinity(0)
    names = [f"site-{number}" for number in range(max(2, len(cores)))]
    with started(names, tmp_path / "none.toml", tmp_path, False, ["server-1"]) as children:
        of_sites = [os.sched_getaffinity(children[name].pid) for name in names]
        assert os.sched_getaffinity(children["server-1"].pid) == cores
        codes = held(children, quiet=False)
    assert set.union(*of_sites) == cores and {len(of_site) for of_site in of_sites} == {1}
    assert set(codes.values()) == {2}
    assert "none.toml" in capsys.readouterr().out
