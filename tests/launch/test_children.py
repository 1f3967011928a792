"""Parts of a run that one command starts are commands of their own, which share the cores."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from argosy.errors import Interrupted, RunFailed, StorageError, UserError
from argosy.launch.children import OTHERS_GONE_S, check_codes, started, supervise


def test_parts_that_compute_share_the_cores_and_end_as_they_end(tmp_path: Path, capsys) -> None:
    cores = os.sched_getaffinity(0)
    names = [f"site-{number}" for number in range(max(2, len(cores)))]
    with started(names, tmp_path / "none.toml", tmp_path, False, ["server-1"]) as children:
        of_sites = [os.sched_getaffinity(children[name].pid) for name in names]
        assert os.sched_getaffinity(children["server-1"].pid) == cores
        codes = supervise(children, quiet=False)
    assert set.union(*of_sites) == cores and {len(of_site) for of_site in of_sites} == {1}
    assert set(codes.values()) == {2}
    assert "none.toml" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("codes", "error", "says"),
    [
        ({"oslo": 2, "lyon": 0}, UserError, r"^oslo ended with exit code 2\. "),
        ({"oslo": 2, "lyon": 1}, RunFailed, r"^oslo ended with exit code 2, lyon ended with exit code 1\. "),
        ({"server-1": 74, "oslo": 0}, StorageError, r"^server-1 ended with exit code 74\. .* The same command goes on"),
        ({"server-1": 74, "oslo": 75}, RunFailed, "oslo ended with exit code 75"),
        ({"oslo": 138, "lyon": 138}, Interrupted, "they have saved; the same command goes on"),
        ({"oslo": 143, "lyon": 1}, Interrupted, "they have saved; the same command goes on"),
    ],
)
def test_codes_of_parts_become_one_error(codes, error, says):
    with pytest.raises(error, match=says):
        check_codes(codes, "they have saved", Path("runs/two"))
    check_codes(dict.fromkeys(codes, 0), "they have saved", Path("runs/two"))


def part(script: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE)


def test_servers_do_not_wait_for_workers_that_could_not_begin() -> None:
    began_s = time.monotonic()
    server = "trap 'exit 143' TERM; while :; do sleep 0.1; done"
    codes = supervise({"server-1": part(server), "oslo": part("exit 2"), "lyon": part("exit 2")}, True, ["server-1"])
    assert codes == {"server-1": 0, "oslo": 2, "lyon": 2}
    assert time.monotonic() - began_s < OTHERS_GONE_S


def test_sites_end_if_too_few_could_begin_to_be_a_quorum(capsys) -> None:
    began_s = time.monotonic()
    site = "trap 'exit 143' TERM; while :; do sleep 0.1; done"
    codes = supervise({"oslo": part(site), "lyon": part("sleep 0.2; exit 2")}, False, quorum=2)
    assert codes == {"oslo": 0, "lyon": 2}
    assert time.monotonic() - began_s < OTHERS_GONE_S
    said = capsys.readouterr().out
    assert "go on" not in said and "oslo ended" not in said


def test_sites_that_are_a_quorum_go_on(capsys) -> None:
    codes = supervise({"oslo": part("sleep 0.5"), "lyon": part("exit 2")}, False, quorum=1)
    assert codes == {"oslo": 0, "lyon": 2}
    assert "lyon ended with exit code 2; the others go on" in capsys.readouterr().out


def test_nothing_is_said_to_go_on_after_a_signal_to_all(capsys) -> None:
    parts = {"oslo": part("trap 'exit 143' TERM; while :; do sleep 0.1; done")}
    parts["lyon"] = part("trap 'sleep 0.5; exit 143' TERM; while :; do sleep 0.1; done")
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
    assert supervise(parts, False) == {"oslo": 143, "lyon": 143}
    said = capsys.readouterr().out
    assert "oslo ended with exit code 143" in said and "go on" not in said
