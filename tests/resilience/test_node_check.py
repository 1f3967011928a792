"""A node health check finds wrong results and wrong memory, and calls nothing wrong that is right."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from statistics import median

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from argosy import faults
from argosy.precision import FLOAT_DTYPES
from argosy.processes.child import ForkEntry
from argosy.processes.fork_server import ForkServer
from argosy.resilience.node_check import ComputeUnit, check_node, factors, multiply, remember, units, wrong_number
from argosy.resilience.node_health import Health, NodeCheck, NodeCheckRequest, NodeRates, WrongResult

HERE = "resilience.test_node_check"
CORE = ComputeUnit(torch.device("cpu"), min(os.sched_getaffinity(0)), memory_bytes=2**20)
WRONG = WrongResult("core 1", "fp32 product", "7, not 8, at [3, 4]", 1, 20)


@pytest.fixture
def armed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Let faults strike in this process, for the test alone."""
    monkeypatch.delenv(faults.RUN_DIR, raising=False)
    yield faults.arm
    faults.arm("")


# ---- products ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number_format", ["fp32", "bf16", "fp16"])
def test_products_are_exact_in_every_format_and_order(number_format):
    a, b = factors(64, FLOAT_DTYPES[number_format], torch.device("cpu"))
    exact = a.long() @ b.long()
    assert exact.abs().max() > 2 * len(b) ** 0.5, "large enough to say something"
    assert torch.equal((a @ b).long(), exact)
    order = torch.randperm(a.shape[1])
    assert torch.equal((a[:, order] @ b[order]).long(), exact)
    assert wrong_number(a, b, a @ b) is None


BITS = [("fp32", bit) for bit in range(32)] + [("bf16", bit) for bit in range(16)]


@pytest.mark.parametrize(("number_format", "bit"), BITS)
def test_any_flipped_bit_of_a_product_is_seen_and_where_it_is(number_format, bit):
    a, b = factors(32, FLOAT_DTYPES[number_format], torch.device("cpu"))
    product = a @ b
    integer, width = (torch.int32, 32) if number_format == "fp32" else (torch.int16, 16)
    product.view(integer)[5, 7] ^= 1 << bit if bit < width - 1 else -(1 << bit)
    problem = wrong_number(a, b, product)
    assert problem is not None and problem.endswith(f", not {(a @ b)[5, 7].item():.9g}, at [5, 7]")


def test_a_core_that_is_well_is_not_called_wrong_and_its_rates_are_told():
    health = check_node([CORE], NodeCheckRequest(0.2, "bf16", 0))
    assert not health.wrong and not health.unknown
    assert set(health.rates) == {"core fp32 product", "core bf16 product", "core memory"}
    assert all(rate > 1e6 for rate in health.rates.values())


def test_a_product_that_is_wrong_once_is_reported_with_its_place(armed):
    armed("flip@node_check:tensor=*product,index=517,bit=12")
    wrong = multiply(CORE, "fp32", 0.05).wrong
    assert wrong is not None and wrong.times == 1
    assert (wrong.device, wrong.test) == (str(CORE), "fp32 product") and wrong.problem.endswith("at [1, 5]")


def test_a_bit_that_memory_does_not_keep_is_reported_with_its_place(armed):
    armed("flip@node_check:tensor=*memory,index=100,bit=3")
    assert multiply(CORE, "fp32", 0.0).wrong is None, "that is no memory"
    wrong = remember(CORE, 0.0).wrong
    assert wrong is not None and wrong.problem.endswith(", at byte 800 (address)")
    found, expected = (int(word, 16) for word in wrong.problem.partition(", at")[0].split(", not "))
    assert found ^ expected == 1 << 3
    assert remember(CORE, 0.05).wrong is None


def test_all_cores_are_checked_and_memory_is_bounded():
    some = units(gpus=0)
    assert [unit.number for unit in some] == sorted(os.sched_getaffinity(0))
    assert 0 < sum(unit.memory_bytes for unit in some) <= 2**30


# ---- the process that checks the node ----------------------------------------------------------------------------


def die() -> None:
    """Entry: a check that meets a broken machine."""
    os.kill(os.getpid(), signal.SIGBUS)


def fail() -> None:
    """Entry: a check that fails."""
    raise SystemExit(3)


def sleep() -> None:
    """Entry: a check that never ends."""
    time.sleep(60)


@pytest.fixture(scope="module")
def fork_server() -> Iterator[ForkServer]:
    forks = ForkServer("argosy.resilience.node_check")
    yield forks
    forks.close()


def result(fork_server: ForkServer) -> Health:
    """The result of a check."""
    node_check = NodeCheck(fork_server, NodeCheckRequest(0.05, "fp32", 0), {})
    end_s = time.monotonic() + 60
    while time.monotonic() < end_s:
        for message in fork_server.take():
            if message["kind"] == "forked":
                node_check.pid = message["pid"]
            elif message["pid"] == node_check.pid:
                return node_check.ended(message["exit_code"])
        node_check.end_if_late()
        time.sleep(0.01)
    raise AssertionError("it never ended")


def test_a_process_checks_the_node_and_reports_what_it_found(fork_server):
    health = result(fork_server)
    assert not health.wrong and not health.unknown and health.rates["core memory"] > 0


def test_a_check_that_dies_of_the_machine_is_evidence(fork_server, monkeypatch):
    monkeypatch.setattr("argosy.resilience.node_health.NODE_CHECK", ForkEntry.of(die))
    (wrong,) = result(fork_server).wrong
    assert wrong.problem == "died of SIGBUS"


def test_a_check_that_never_ends_is_killed_and_evidence(fork_server, monkeypatch):
    monkeypatch.setattr("argosy.resilience.node_health.NODE_CHECK", ForkEntry.of(sleep))
    monkeypatch.setattr("argosy.resilience.node_health.CHECK_PATIENCE_S", 0.1)
    (wrong,) = result(fork_server).wrong
    assert wrong.problem.startswith("not ended")


def test_a_check_that_fails_is_no_evidence(fork_server, monkeypatch):
    monkeypatch.setattr("argosy.resilience.node_health.NODE_CHECK", ForkEntry.of(fail))
    health = result(fork_server)
    assert not health.wrong and "exit code 3" in health.unknown


# ---- nodes compared ---------------------------------------------------------------------------------------------


def slow_nodes(rates: dict[str, dict[str, float]]) -> dict[str, str]:
    """The nodes that are found slow once all of them were heard of."""
    found = NodeRates()
    for node, own in rates.items():
        found.put(node, own)
    return found.slow()


def test_a_node_that_is_much_slower_than_the_median_of_the_others_is_named():
    usual = {"core fp32 product": 1e11, "core memory": 5e9}
    rates = {"a": usual, "b": {**usual, "core memory": 2e9}, "c": usual}
    slow = slow_nodes(rates)
    assert set(slow) == {"b"} and "core memory at 2e+09/s, the others 5e+09/s" in slow["b"]


def test_nodes_that_differ_a_little_or_stand_alone_are_not():
    usual = {"core fp32 product": 1e11}
    assert not slow_nodes({"a": usual, "b": {"core fp32 product": 6e10}})
    assert not slow_nodes({"a": usual})
    assert not slow_nodes({"a": usual, "b": {"cuda bf16 product": 1e14}})


RATES = st.dictionaries(st.sampled_from(["product", "memory"]), st.sampled_from([0.0, 1.0, 2.0, 4.0, 9.0, 20.0]))


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.none() | RATES), max_size=30))
def test_nodes_that_come_and_go_are_each_compared_with_all_others(happens):
    kept, rates = NodeRates(), {}
    for node, own in happens:
        if own is None:
            kept.remove(node)
            rates.pop(node, None)
        else:
            kept.put(node, own)
            rates[node] = own
        slow = set()
        for one, ones in rates.items():
            for what, rate in ones.items():
                others = [theirs[what] for other, theirs in rates.items() if other != one and what in theirs]
                if others and median(others) > 2 * rate:
                    slow.add(one)
        assert set(kept.slow()) == slow


def test_evidence_is_a_sentence():
    assert str(WRONG) == "core 1, fp32 product: 7, not 8, at [3, 4] (1 of 20 times)"
