"""The matrix of faults, its sites: one is killed, loses its folder, or its link is cut, and it comes back.

The others go on if they are a quorum, each sample is trained on once, and all end with the same weights. Rows with a
link that is cut need root, for the namespaces, and are left out where it is not to be had.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from argosy.sync.process import EXCHANGE
from commands import Folder
from network import Network, NotPermitted, network
from several_sites import H, SitesOfARun, children_of, kill_process, several_sites

pytestmark = pytest.mark.slow

SLOW_STEPS = 20 * H
SYNC = {"wire": "int8", "patience_s": 600.0}
CUT_S = 30.0


@pytest.fixture
def sites(folder: Folder) -> Iterator[Callable[..., SitesOfARun]]:
    """Runs of several sites."""
    with several_sites(folder) as make:
        yield make


@pytest.fixture(scope="module")
def undisturbed_weights(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """What a run of two sites comes to that is left alone."""
    run = SitesOfARun(Folder(tmp_path_factory.mktemp("alone"), corpus), steps=SLOW_STEPS, sync=SYNC, is_paced=True)
    run.go()
    for name in run.names:
        run.start(name)
    run.end()
    return run.same_weights()


@pytest.mark.parametrize("name", ["A", "B"])
def test_a_site_that_is_killed_and_comes_back_changes_no_bit(
    sites: Callable[..., SitesOfARun], undisturbed_weights: dict[str, torch.Tensor], name: str
) -> None:
    run = sites(steps=SLOW_STEPS, sync=SYNC, is_paced=True)
    processes = {each: run.start(each) for each in run.names}
    for rounds in (3, 7):
        run.wait(lambda rounds=rounds: len(run.ledger(name).lines) >= rounds)  # type: ignore[misc]
        run.kill(processes[name])
        processes[name] = run.start(name)
    run.end()
    ledger = run.check_ledger()
    assert all(list(line.tokens) == ["A", "B"] for line in ledger.lines)
    got = run.same_weights()
    assert all(torch.equal(got[key], value) for key, value in undisturbed_weights.items())


def test_an_exchange_that_is_killed_changes_no_bit(
    sites: Callable[..., SitesOfARun], undisturbed_weights: dict[str, torch.Tensor]
) -> None:
    run = sites(steps=SLOW_STEPS, sync=SYNC, is_paced=True)
    processes = [run.start(name) for name in run.names]
    for rounds in (2, 5):
        run.wait(lambda rounds=rounds: len(run.ledger("B").lines) >= rounds)  # type: ignore[misc]
        for process in processes:
            for pid in children_of(process.pid):
                if EXCHANGE in command_of(pid):
                    kill_process(pid)
    run.end()
    run.check_ledger()
    got = run.same_weights()
    assert all(torch.equal(got[key], value) for key, value in undisturbed_weights.items())
    assert any(event["event"] == "exchange_died" for event in run.events("A", "launcher"))


def command_of(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode().replace("\0", " ")
    return ""


@pytest.mark.parametrize("lost", ["A", "C"])  # A leads
def test_the_others_go_on_without_a_site_and_it_comes_back(sites: Callable[..., SitesOfARun], lost: str) -> None:
    run = sites(names="ABC", steps=40 * H, sync={"patience_s": 5.0}, is_paced=True)
    options = ("--train.global-batch", 12, "--checkpoint.every-steps", 6)
    processes = {name: run.start(name, *options) for name in run.names}
    run.wait(lambda: len(run.ledger(lost).lines) >= 4)
    run.kill(processes[lost])
    run.wait(lambda: any(lost not in line.tokens for line in run.ledger("B").lines))
    run.start(lost, *options)
    run.wait(lambda: run.takes_part(lost, "B"))
    run.end()
    ledger = run.check_ledger()
    present = [lost in line.tokens for line in ledger.lines]
    assert present[0] and present[-1] and not all(present)
    assert all(len(line.tokens) >= 2 for line in ledger.lines)
    run.same_weights()


def test_a_site_whose_ledger_has_a_flipped_bit_takes_the_line_of_another(sites: Callable[..., SitesOfARun]) -> None:
    run = sites(names="AB", steps=8 * H, is_paced=True)
    processes = {name: run.start(name) for name in run.names}
    run.wait(lambda: all(len(run.ledger(name).lines) >= 3 for name in run.names))
    run.kill(processes["A"])
    path = run.ledger("A").path
    damaged = bytearray(path.read_bytes())
    damaged[damaged.index(b'"round"') + 3] ^= 1
    path.write_bytes(damaged)
    run.start("A")
    run.wait(lambda: any(event["event"] == "ledger_mended" for event in run.events("A")))
    run.end()
    assert not any(event["event"] in ("exchange_died", "state_taken") for event in run.events("A"))
    assert all(list(line.tokens) == ["A", "B"] for line in run.check_ledger().lines)
    run.same_weights()


def test_a_site_whose_folder_is_lost_takes_the_state_of_another(sites: Callable[..., SitesOfARun]) -> None:
    run = sites(names="ABC", steps=40 * H, sync={"patience_s": 5.0}, is_paced=True)
    options = ("--train.global-batch", 12, "--checkpoint.every-steps", 6)
    processes = {name: run.start(name, *options) for name in run.names}
    run.wait(lambda: len(run.ledger("C").lines) >= 9)
    run.kill(processes["C"])
    shutil.rmtree(run.path("C"))
    run.start("C", *options)
    run.wait(lambda: any(event["event"] == "state_taken" for event in run.events("C")))
    run.wait(lambda: run.takes_part("C", "B"))
    run.end()
    ledger = run.check_ledger()
    assert "C" in ledger.lines[-1].tokens
    assert any(event["event"] == "state_taken" for event in run.events("C", "rank-0"))
    run.same_weights()


def test_two_sites_that_went_on_alone_come_together_again(sites: Callable[..., SitesOfARun]) -> None:
    run = sites(steps=40 * H, sync={"patience_s": 3.0, "quorum": 1}, is_paced=True)
    first = run.start("A")
    run.wait(lambda: len(run.ledger("A").lines) >= 12)
    run.kill(first)
    second = run.start("B")
    run.wait(lambda: len(run.ledger("B").lines) >= 3)
    run.start("A")
    run.wait(lambda: any(event["event"] == "state_taken" for event in run.events("B")))
    run.wait(lambda: run.takes_part("B", "A"))
    run.end()
    assert second.returncode == 0
    ledger = run.check_ledger()
    assert list(ledger.lines[0].tokens) == ["A"] and list(ledger.lines[-1].tokens) == ["A", "B"]
    assert any(event["event"] == "site_gives_way" for event in run.events("B"))
    run.same_weights()


@pytest.fixture
def net() -> Iterator[Network]:
    """Three nodes, joined by a switch."""
    try:
        with network("a", "b", "c") as built:
            yield built
    except NotPermitted as problem:
        pytest.skip(str(problem))


@pytest.mark.parametrize("cut", ["A", "C"])  # A leads
def test_a_link_that_is_cut_for_half_a_minute(sites: Callable[..., SitesOfARun], net: Network, cut: str) -> None:
    run = sites(names="ABC", steps=60 * H, sync={"patience_s": 5.0}, is_paced=True, net=net)
    for name in run.names:  # averages are kept as long as a checkpoint needs them, here from the first one on
        run.start(name, "--train.global-batch", 12, "--checkpoint.every-steps", 0)
    run.wait(lambda: len(run.ledger("B").lines) >= 4)
    net.cut_off(cut.lower())
    until = time.monotonic() + CUT_S
    run.wait(lambda: not run.takes_part(cut, "B"))
    while time.monotonic() < until:
        time.sleep(0.1)
    net.let_through(cut.lower())
    run.wait(lambda: run.takes_part(cut, "B"))
    run.end()
    ledger = run.check_ledger()
    assert all(len(line.tokens) >= 2 for line in ledger.lines)
    assert len({line.round for line in ledger.lines if cut not in line.tokens}) >= 3  # the others went on
    assert not any(event["event"] == "state_taken" for event in run.events(cut))  # the averages were enough
    run.same_weights()


def test_two_sites_wait_for_the_link_between_them(
    sites: Callable[..., SitesOfARun], net: Network, undisturbed_weights: dict[str, torch.Tensor]
) -> None:
    run = sites(steps=SLOW_STEPS, sync=SYNC, is_paced=True, net=net)
    for name in run.names:
        run.start(name)
    run.wait(lambda: len(run.ledger("B").lines) >= 4)
    net.cut_off("b")
    run.wait(lambda: any(event["event"] == "site_lost" for event in run.events("A")))
    net.let_through("b")
    run.end()
    assert all(list(line.tokens) == ["A", "B"] for line in run.check_ledger().lines)
    got = run.same_weights()
    assert all(torch.equal(got[key], value) for key, value in undisturbed_weights.items())
