"""What an asynchronous run cannot have is refused before anything starts, in a sentence that says what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from argosy.config.sync import SiteConfig, SyncConfig
from argosy.errors import UserError
from argosy.launch.servers import check, serve, settle_worker
from argosy.plan.plan import Plan
from argosy.plan.rules import first_problem
from tiny import run_config


def asynchronous(sites=("A", "B"), plan="auto,sync=async", servers=("127.0.0.1:7100",), **sections):
    run = run_config(Path("corpus"), **sections)
    named = tuple(site if isinstance(site, SiteConfig) else SiteConfig(name=site) for site in sites)
    sync = run.sync.model_copy(update={"servers": servers})
    return run.model_copy(update={"plan": plan, "sites": named, "sync": sync})


@pytest.mark.parametrize(
    ("run", "why"),
    [
        (asynchronous(sites=()), r"has no \[\[sites\]\]"),
        (asynchronous(train={"steps": 0, "minutes": 1}), "Give train.steps"),
        (asynchronous(sites=("A", SiteConfig(name="B", batch=4))), "sites.batch = 4 of B"),
        (asynchronous(sites=("A", SiteConfig(name="B", plan="auto"))), "add sync=async"),
        (asynchronous(resilience={"replay_check_every_steps": 5}), "replay_check_every_steps = 5"),
        (asynchronous(observe={"noise_scale_every_steps": 5}), "noise_scale_every_steps = 5"),
        (asynchronous(observe={"norms_every_steps": 5}), "norms_every_steps = 5 is not supported with plan.sync"),
        (asynchronous(observe={"profile": {"steps": "3:5"}}), "profile.steps = 3:5 is not supported with plan.sync"),
        (asynchronous(sync={"from_step": 5}), "from_step = 5"),
        (asynchronous(train={"steps": 9}, sync={"local_steps": 4}), "Try train.steps = 8"),
        (asynchronous(servers=tuple(f"a:{n + 1}" for n in range(99))), "99 servers are more than"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_is_refused(run, why):
    with pytest.raises(UserError, match=why):
        check(run)


def test_a_worker_has_its_own_folder_plan_and_processes(tmp_path):
    sites = ("A", SiteConfig(name="B", plan="dp_shard=2,sync=async", processes=2))
    run = asynchronous(sites=sites).model_copy(update={"site": "B"})
    own, folder = settle_worker(run, tmp_path)
    assert folder == tmp_path / "sites/B"
    assert (own.plan, own.launch.processes) == ("dp_shard=2,sync=async", 2)
    assert own.train.global_batch == run.train.global_batch
    assert (tmp_path / ".secret").exists()


def test_servers_need_addresses_and_an_asynchronous_run(tmp_path):
    with pytest.raises(UserError, match=r"sync\.servers is empty"):
        settle_worker(asynchronous(servers=()).model_copy(update={"site": "A"}), tmp_path)
    with pytest.raises(UserError, match=r"only a run with plan\.sync = async"):
        serve(asynchronous(plan="auto").model_copy(update={"site": "server-1"}), tmp_path)
    with pytest.raises(UserError, match="has 1 address;"):
        serve(asynchronous().model_copy(update={"site": "server-2"}), tmp_path)


def test_plans_that_do_not_go_with_it_are_refused():
    run = asynchronous()
    assert first_problem(Plan.parse("sync=async,microbatch=2"), run) is None
    fp16 = first_problem(Plan.parse("sync=async,precision=fp16"), run)
    assert fp16 is not None
    assert "precision = fp16" in fp16
    alone = first_problem(Plan.parse("sync=async"), run.model_copy(update={"sites": ()}))
    assert alone is not None
    assert "[[sites]]" in alone
    assert SyncConfig().max_staleness == 16
