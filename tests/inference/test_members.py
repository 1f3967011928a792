"""A model in several processes of this machine says what it says in one, and they end with it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

import argosy
from argosy.chaos.campaign import children
from argosy.errors import ArgosyWarning, RunFailed, UserError
from argosy.inference import members
from argosy.inference.loaded_model import LoadedModel
from argosy.inference.members import check_devices, launched_world
from argosy.inference.sampling import Sampling
from argosy.parallel.world import World
from argosy.plan.plan import Plan
from waiting import wait_until
from workers import WorkerPool

PROMPTS = ["def train(", "import", [0, 5, 6]]
FREE = Sampling(max_tokens=20, temperature=1.0, top_p=0.9, seed=1)


def descendants(pid: int) -> set[int]:
    return {each for child in children(pid) for each in (child, *descendants(child))}


def members_since(before: set[int]) -> list[int]:
    """The processes of the model: of the new ones those that have forked none."""
    return [pid for pid in descendants(os.getpid()) - before if not children(pid)]


@pytest.mark.filterwarnings("ignore::argosy.errors.ArgosyWarning")  # few cores
def test_two_processes_say_what_one_says_and_end_with_the_model(trained: Path):
    tokens = torch.randint(0, 400, (3, 7), generator=torch.Generator().manual_seed(0))
    with argosy.load_model(trained) as model:
        texts, logits = list(model.complete(PROMPTS, FREE, batch_size=2)), model.logits(tokens)
    before = descendants(os.getpid())
    with argosy.load_model(trained, "tp=2") as model:
        torch.testing.assert_close(model.logits(tokens), logits, rtol=1e-5, atol=1e-5)
        pieces = model.stream(PROMPTS, FREE)
        next(pieces)
        pieces.close()  # what is still written of it is dropped
        both = [model.complete(PROMPTS, FREE, batch_size=2) for _ in range(2)]
        assert list(zip(*both, strict=True)) == list(zip(texts, texts, strict=True))  # read by turns
        processes = members_since(before)
        assert len(processes) == 2
        os.kill(processes[1], signal.SIGKILL)
        with pytest.raises(RunFailed, match=r"process \d of the model ended: killed by SIGKILL"):
            model.generate(PROMPTS, max_tokens=100)
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in processes))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::argosy.errors.ArgosyWarning")
def test_held_out_text_gets_the_same_score(trained: Path, corpus: Path):
    alone = argosy.evaluate(trained, max_tokens=2000)
    for plan in ("dp_shard=2", "pp=2,tp=2"):
        found = argosy.evaluate(trained, max_tokens=2000, plan=plan)
        assert found.tokens == alone.tokens and found.loss == pytest.approx(alone.loss, rel=1e-6)
        assert found.bits_per_byte == pytest.approx(alone.bits_per_byte, rel=1e-6)
    with pytest.raises(UserError, match=r"data\.seq_len = 31 is not a multiple of 2"):
        argosy.evaluate(trained, seq_len=31, plan="tp=2")


def in_launched_world(world: World, trained: Path, plan: str) -> tuple[list[str], float]:
    with LoadedModel(trained, Plan.parse(plan), world=world) as model:
        texts = [completion.text for completion in model.complete(PROMPTS, FREE)]
    return texts, argosy.evaluate(trained, max_tokens=1000, plan=plan, world=world).loss


def test_processes_of_a_launcher_say_what_one_says(workers: WorkerPool, trained: Path):
    texts, loss = in_launched_world(World(), trained, "")
    for found, their_loss in workers.run(2, in_launched_world, trained, "tp=2"):
        assert found == texts and their_loss == pytest.approx(loss, rel=1e-6)


def test_a_launcher_that_started_another_number_is_refused(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    said = r"is for 2 processes, and the launcher has started 4 \(WORLD_SIZE\)"
    with pytest.raises(UserError, match=said), launched_world(Plan.parse("tp=2")):
        pass


@pytest.mark.parametrize(
    ("devices", "plan", "message"),
    [
        (2, "tp=4", r'plan = "tp=4.*" is for 4 devices, and this machine has 2 \(cuda\)\. Name a plan for 2 or fewer'),
        (0, "dp_replicate=10000", r"10000 devices, and this machine has \d+ cores and no GPU"),
    ],
)
def test_a_plan_whose_devices_are_not_there_is_refused(monkeypatch, devices, plan, message):
    monkeypatch.setattr(members, "count_here", lambda: devices)
    monkeypatch.setattr(members, "type_here", lambda: "cuda" if devices else "cpu")
    with pytest.raises(UserError, match=message):
        check_devices(Plan.parse(plan))


def test_processes_that_share_cores_are_a_warning(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    with pytest.warns(ArgosyWarning, match="2 processes on 1 cores will wait for each other"):
        check_devices(Plan.parse("tp=2"))


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ("auto,tp=2", "nothing is planned for a model that is only used"),
        ("tp=3", r"plan\.tp = 3 does not divide model\.heads"),
        ("size=3", "unknown key 'size'"),
    ],
)
def test_a_wrong_plan_is_refused_before_anything_starts(trained: Path, monkeypatch, plan: str, message: str):
    monkeypatch.setattr(members, "LocalWorld", None)
    for use in (argosy.load_model, argosy.evaluate):
        with pytest.raises(UserError, match=message):
            use(trained, plan=plan)
