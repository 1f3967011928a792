"""Sweeps, as a user runs, kills and resumes them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator

import pytest

from argosy.checkpoint import store
from commands import Folder
from slurm import WHERE_FROM, is_installed, slurm
from sweep_folders import losses, result, starts, sweeps_of, write
from waiting import PATIENT_S, wait_until


@pytest.fixture
def sweeping(folder: Folder) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start sweeps. At the end, end them and the trials that they have left."""
    with sweeps_of(folder) as start:
        yield start


def test_a_killed_sweep_goes_on_and_counts_no_trial_twice(folder: Folder, sweeping):
    sweep = write(folder, "method = 'grid'\n[parameters]\noptimizer.lr = [1e-3, 1e-2]", steps=10)
    slow = {"ARGOSY_FAULTS": "slow@forward:seconds=0.2"}
    process = sweeping(**slow)
    wait_until((sweep / "0000").exists, process=process)
    refused = folder.argosy_here("sweep", "lr.toml", code=2)
    assert re.search(r"sweeps/lr is in use by process \d+", refused)
    wait_until(lambda: store.committed(sweep / "0000"), process=process)
    process.kill()
    process.communicate()
    trial = int((sweep / "0000" / ".lock").read_text().split()[0])
    os.kill(trial, signal.SIGKILL)
    again = sweeping()
    out, err = again.communicate(timeout=PATIENT_S)
    assert again.returncode == 0, out + err
    found = result(folder)
    assert [(t["trial"], t["state"], t["steps"]) for t in found["trials"]] == [(0, "done", 10), (1, "done", 10)]
    assert found["best"] == min(found["trials"], key=lambda t: t["metric"])["trial"]
    assert len(losses(sweep / "0000")) == len(losses(sweep / "0001")) == 10
    assert starts(sweep / "0000")[0] == 0 < starts(sweep / "0000")[-1] and len(starts(sweep / "0001")) == 1
    assert "best" in out and "next: argosy train sweeps/lr/best.toml" in out
    assert (sweep / "trials.svg").read_text().count("<circle") == 4
    assert f"lr = {found['trials'][found['best']]['values']['optimizer.lr']}" in (sweep / "best.toml").read_text()
    assert re.search(r"0000 +finished +step 10 +local", folder.argosy_here("runs", "sweeps/lr"))
    assert "done: 10 steps" in folder.argosy_here("logs", "sweeps/lr/0001")


@pytest.mark.slow
def test_promoted_trials_go_on_from_their_checkpoints_bit_for_bit(folder: Folder, sweeping):
    sweep = write(folder, "method = 'halving'\ntrials = 4\nhalving.eta = 2\n[parameters]\n"
                  "optimizer.lr = { min = 1e-4, max = 1e-1, log = true }", steps=16)  # fmt: skip
    out, err = sweeping().communicate(timeout=PATIENT_S)
    found = result(folder)
    assert sorted((t["state"], t["steps"]) for t in found["trials"]) == [
        ("done", 16), ("stopped", 4), ("stopped", 4), ("stopped", 8)], out + err  # fmt: skip
    at_4 = {t["trial"]: t["rungs"]["4"] for t in found["trials"]}
    promoted = {t["trial"] for t in found["trials"] if "8" in t["rungs"]}
    assert promoted == set(sorted(at_4, key=at_4.__getitem__)[:2])
    best = sweep / f"{found['best']:04d}"
    assert starts(best) == [0, 4, 8]
    folder.argosy("train", "sweeps/lr/best.toml", "--launch.threads", "1")
    assert losses(folder.path / "runs" / "lr-best") == losses(best)
    once_more = folder.argosy("sweep", "lr.toml")
    assert result(folder) == found and "goes on" not in once_more


@pytest.mark.slow
def test_ctrl_c_saves_what_runs_and_a_killed_trial_goes_on(folder: Folder, sweeping):
    sweep = write(folder, "method = 'tpe'\ntrials = 3\n[parameters]\n"
                  "optimizer.lr = { min = 1e-3, max = 1e-1, log = true }", steps=30)  # fmt: skip
    process = sweeping(ARGOSY_FAULTS="slow@forward:seconds=0.2")
    wait_until(lambda: all(len(losses(sweep / f"000{n}")) > 5 for n in (0, 1)), process=process)
    os.kill(int((sweep / "0001" / ".lock").read_text().split()[0]), signal.SIGKILL)
    wait_until(lambda: len(starts(sweep / "0001")) == 2 and len(losses(sweep / "0001")) > 8, process=process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENT_S)
    assert process.returncode == 130, out + err
    assert "trial 0001 was interrupted" in out + err and "The same command goes on" in err
    made = [len(losses(sweep / f"000{n}")) for n in (0, 1)]
    assert all(list((sweep / f"000{n}" / "checkpoints").glob(f"step-*{steps}")) for n, steps in enumerate(made))
    out, err = sweeping().communicate(timeout=PATIENT_S)
    found = result(folder)
    assert [(t["state"], t["steps"]) for t in found["trials"]] == [("done", 30)] * 3, out + err
    assert starts(sweep / "0000") == [0, made[0]]


@pytest.mark.slow
def test_a_trial_that_diverges_is_recorded_and_the_others_go_on(folder: Folder, sweeping):
    write(folder, "method = 'grid'\n[parameters]\noptimizer.lr = [1e9, 1e-2]", steps=20)
    out, err = sweeping().communicate(timeout=PATIENT_S)
    lost, good = result(folder)["trials"]
    assert lost["state"] == "failed" and lost["reason"].startswith("diverged"), out + err
    assert good["state"] == "done"


@pytest.mark.slow
def test_trials_that_all_fail_alike_end_the_sweep(folder: Folder, sweeping):
    write(folder, "method = 'grid'\n[parameters]\noptimizer.lr = [1e-3, 2e-3, 3e-3, 4e-3, 5e-3, 6e-3]")
    text = (folder.path / "run.toml").read_text()
    (folder.path / "run.toml").write_text(text.replace(str(folder.corpus), str(folder.path / "nowhere")))
    process = sweeping()
    _, err = process.communicate(timeout=PATIENT_S)
    assert process.returncode == 1 and re.search("the first [34] trials failed alike: .*no prepared data here", err)
    assert len(result(folder)["trials"]) <= 4


def test_wrong_input_is_refused_and_nothing_is_written(folder: Folder, refused):
    write(folder, "method = 'grid'\n[parameters]\noptimizer.lr = [1e-3, -1]")
    refused("sweep", "lr.toml", said=("lr.toml:4: optimizer.lr = -1.0",))
    refused("sweep", "none.toml", said=("none.toml: there is no such sweep file",))
    write(folder, "method = 'grid'\n[parameters]\noptimizer.lr = [1e-3]")
    refused("sweep", "lr.toml", "--show", said=("there is no sweep yet",))
    refused("sweep", "lr.toml", "--time", "1:00:00", said=("--on local: --time has no meaning there",))
    (folder.path / "mine").mkdir()
    (folder.path / "mine" / "thesis.txt").touch()
    refused("sweep", "lr.toml", "--sweep-dir", "mine", said=("not the folder of a sweep", "thesis.txt"))
    with_no_data = (folder.path / "run.toml").read_text().replace("sources =", "# sources =")
    (folder.path / "run.toml").write_text(with_no_data)
    refused("sweep", "lr.toml", said=("has no data to train on",))


def test_a_changed_sweep_file_is_refused_for_the_same_folder(folder: Folder, refused):
    sweep = write(folder, "method = 'random'\ntrials = 2\n[parameters]\noptimizer.lr = { min = 1e-3, max = 1 }")
    from argosy.sweep.load import load_sweep
    from argosy.sweep.study import Study, enter

    sweep.mkdir(parents=True)
    before = load_sweep(folder.path / "lr.toml")
    enter(sweep, before)
    Study(sweep, before)
    write(folder, "method = 'random'\ntrials = 1\n[parameters]\noptimizer.lr = { min = 1e-3, max = 2 }", steps=9)
    said = ("holds another sweep", "trials: 2 in the folder, 1 now", "parameters.optimizer.lr:", "'max': 1.0",
            "run: train.steps: 12 in the folder, 9 now")  # fmt: skip
    (sweep / ".lock").touch()
    refused("sweep", "lr.toml", said=said)
    write(folder, "method = 'random'\ntrials = 5\n[parameters]\noptimizer.lr = { min = 1e-3, max = 1 }")
    assert "no trials yet" in folder.argosy_here("sweep", "lr.toml", "--show")


@pytest.mark.slow
@pytest.mark.skipif(not is_installed(), reason=WHERE_FROM)
def test_trials_are_tasks_of_array_jobs_that_a_killed_sweep_finds_again(folder: Folder, sweeping, tmp_path_factory):
    sweep = write(folder, "method = 'halving'\ntrials = 4\nhalving.eta = 4\n[parameters]\n"
                  "optimizer.lr = { min = 1e-3, max = 1e-1, log = true }", steps=40)  # fmt: skip
    with slurm(tmp_path_factory.mktemp("slurm"), nodes=2) as cluster:
        slow = {"ARGOSY_FAULTS": "slow@forward:seconds=0.2", **cluster.environment}
        process = sweeping("--on", "slurm", "--partition", "main", **slow)
        wait_until(lambda: len(losses(sweep / "0001")) > 1, process=process)
        process.kill()
        process.communicate()
        again = sweeping("--on", "slurm", "--partition", "main", **cluster.environment)
        out, err = again.communicate(timeout=400)
        assert again.returncode == 0, out + err
        listed = cluster.ask("squeue", "--states=all", "--noheader", "--array", "--format=%i").split()
        assert len({number.partition("_")[0] for number in listed}) == 2 and len(listed) == 5, listed
        trials = result(folder)["trials"]
        assert sorted((t["state"], t["steps"]) for t in trials) == [("done", 40), *[("stopped", 10)] * 3]
        refused = folder.start("sweep", "lr.toml", "--on", "slurm", "--sweep-dir", "b", "--partition", "fast", **slow)
        _, err = refused.communicate(timeout=PATIENT_S)
        assert refused.returncode == 2 and "invalid partition" in err
