"""A run of several sites keeps what was chosen for it, wherever it is said."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from argosy.config.dump import save_run
from argosy.config.load import load
from argosy.errors import UserError
from argosy.launch.local import train
from argosy.launch.sites import checked, with_rounds
from argosy.plan.search.auto import Devices, choose_plan
from argosy.sync.layout import Sites, at_site

CLUSTER = """
[[groups]]
device = "cpu"
nodes = 1
site = "oslo"
[[groups]]
device = "cpu"
nodes = 1
site = "lyon"
[[links]]
sites = ["oslo", "lyon"]
bandwidth_bytes_per_s = {rate}
latency_s = 0.01
"""


def run_file(folder: Path, rate: float = 1e6, sync: str = "", plan: str = "auto,sync=auto") -> Path:
    (folder / "cluster.toml").write_text(CLUSTER.format(rate=rate))
    path = folder / "run.toml"
    path.write_text(
        f'plan = "{plan}"\n[launch]\ncluster = "{folder}/cluster.toml"\n[train]\nsteps = 100\nglobal_batch = 8\n'
        f'[model]\npreset = "llama-5m"\nvocab_size = 4096\n{sync}\n[[sites]]\nname = "oslo"\n[[sites]]\nname = "lyon"\n'
    )
    return path


def test_what_is_open_is_chosen_said_and_kept(tmp_path: Path) -> None:
    said: list[str] = []
    chosen = with_rounds(load(run_file(tmp_path)), (tmp_path / "none",), said.append)
    assert chosen.plan == "auto,sync=diloco" and len(said) == 1 and "sync=auto takes diloco" in said[0]
    folder = tmp_path / "kept"
    folder.mkdir()
    save_run(chosen, folder / "run.toml")
    again = with_rounds(load(run_file(tmp_path, rate=1e12)), (folder,), said.append)
    assert again.sync == chosen.sync and len(said) == 1, "a link that became faster changes no run"
    fresh = with_rounds(load(run_file(tmp_path, rate=1e12)), (tmp_path / "none",), said.append)
    assert fresh.sync != chosen.sync


def test_keys_of_the_run_file_stay(tmp_path: Path) -> None:
    chosen = with_rounds(load(run_file(tmp_path, sync="[sync]\nevery_steps = 7\n")), (), lambda text: None)
    assert chosen.sync.every_steps == 7


def test_a_function_of_steps_is_not_passed_over_for_several_sites(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"on_step with \[\[sites\]\]"):
        train(load(run_file(tmp_path)), tmp_path / "run", on_step=print)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("plan", ["auto,sync=local", "auto,sync=async"])
def test_a_run_that_is_refused_leaves_nothing(tmp_path: Path, plan: str) -> None:
    with pytest.raises(UserError, match=r"there is no data to train on"):
        train(load(run_file(tmp_path, plan=plan)), tmp_path / "runs/two", quiet=True)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("plan", ["auto,sync=local", "auto,sync=async"])
def test_a_missing_package_is_named_before_data_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan: str
) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.asymmetric.ed25519", None)
    with pytest.raises(UserError, match=r"sync\.tls = true needs .*argosy\[tls\]"):
        train(load(run_file(tmp_path, plan=plan)), tmp_path / "runs/two", quiet=True)
    assert not (tmp_path / "runs").exists()


def test_a_site_that_is_refused_leaves_nothing_but_other_sites(tmp_path: Path) -> None:
    run = load(run_file(tmp_path, plan="dp_shard=3,sync=local"), {"launch.processes": 2, "sync.tls": False})
    sites = tuple(site.model_copy(update={"address": "127.0.0.1:7"}) for site in run.sites)
    run = run.model_copy(update={"sites": sites, "site": "oslo"})
    home = tmp_path / "runs/two"
    for is_left in (False, True):
        with pytest.raises(UserError, match=r"is for 3 processes, and launch\.processes = 2"):
            train(run, home, quiet=True)
        assert (home / ".secret").exists() == (tmp_path / "runs").exists() == is_left
        (home / "sites/lyon").mkdir(parents=True, exist_ok=True)


def test_a_plan_that_says_how_sites_agree_is_left_alone(tmp_path: Path) -> None:
    run = load(run_file(tmp_path, plan="auto,sync=local"))
    assert with_rounds(run, (), pytest.fail) is run


def test_without_links_it_is_said_how_to_measure_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = run_file(tmp_path)
    path.write_text(path.read_text().replace(f'cluster = "{tmp_path}/cluster.toml"', ""))
    monkeypatch.chdir(tmp_path.parent)
    with pytest.raises(UserError, match=r"nobody has described it.*argosy probe"):
        with_rounds(load(path), (), pytest.fail)


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ("foo", r'sites.plan = "foo" of lyon: .*neither "auto" nor KEY=VALUE'),
        ("tq=2", r'sites.plan = "tq=2" of lyon: .*unknown key'),
        ("sync=int8", r"of lyon: sync=int8, and the run's plan has sync=local.*Leave sync out"),
        ("tp=2,sync=diloco", r"of lyon: sync=diloco, and the run's plan has sync=local"),
    ],
)
def test_all_plans_are_looked_at_before_any_site_begins(tmp_path: Path, plan: str, said: str) -> None:
    path = run_file(tmp_path, plan="auto,sync=local")
    path.write_text(path.read_text() + f'plan = "{plan}"\n')
    with pytest.raises(UserError, match=said):
        checked(load(path))


def test_sites_that_hold_the_same_weights_hold_them_in_one_format(tmp_path: Path) -> None:
    path = run_file(tmp_path, plan="auto,sync=local")
    path.write_text(path.read_text() + 'plan = "auto,precision=bf16,weights=bf16"\n')
    checked(load(path))
    with pytest.raises(UserError, match=r"sync.from_step = 2: .* weights are bf16 and fp32"):
        checked(load(path, {"sync.from_step": 2}))


def test_sites_do_not_sum_in_fewer_bytes(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"plan.sync = int8, and the run has \[\[sites\]\]"):
        checked(load(run_file(tmp_path, plan="auto,sync=int8")))


@pytest.mark.parametrize("plan", ["tp=2", "tp=2,sync=auto", "tp=2,sync=local"])
def test_a_site_s_plan_has_the_run_s_way_to_agree(tmp_path: Path, plan: str) -> None:
    path = run_file(tmp_path, plan="auto,sync=local")
    path.write_text(path.read_text() + f'plan = "{plan}"\n')
    run = load(path, {"site": "lyon"})
    assert checked(run).plan == "tp=2,sync=local"


@pytest.mark.parametrize(("plan", "settled"), [("auto", "auto,sync=diloco"), ("tp=2", "tp=2,sync=diloco")])
def test_a_plan_without_a_way_to_agree_has_the_usual_one(tmp_path: Path, plan: str, settled: str) -> None:
    run = load(run_file(tmp_path, plan=plan), {"site": "lyon"})
    assert checked(run).plan == settled
    assert choose_plan(checked(run), Devices(2 if plan == "tp=2" else 1, "cpu", fast_bf16=False)).sync == "diloco"


def test_sites_that_agree_in_another_way_are_another_run(tmp_path: Path) -> None:
    one, other = (at_site(load(run_file(tmp_path, plan=f"auto,sync={word}"))) for word in ("local", "diloco"))
    assert Sites.of(one, tmp_path).identity != Sites.of(other, tmp_path).identity
    left_out = at_site(load(run_file(tmp_path, plan="tp=2")))
    assert Sites.of(left_out, tmp_path).identity == Sites.of(other, tmp_path).identity


def test_batches_that_do_not_add_up_are_named(tmp_path: Path) -> None:
    path = run_file(tmp_path, plan="auto")
    path.write_text(path.read_text() + "batch = 8\n")
    with pytest.raises(UserError, match=r"by 2 sites, with sites.batch = 8 of lyon; try train.global_batch = 9"):
        checked(load(path))
