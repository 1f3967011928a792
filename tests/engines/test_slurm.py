"""Batch jobs of runs and programs, and what SLURM's programs say, as far as it goes without a cluster."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from argosy.config.launch import LaunchConfig
from argosy.config.schema import RunConfig
from argosy.engines.engine import ProgramJob, RunJob
from argosy.engines.record import LaunchedJob
from argosy.engines.slurm import AGENT_TASK, Slurm, ask, directives, listed, meaning, output, with_nodes_of_srun
from argosy.errors import UserError

REQUEST = RunJob(
    run=RunConfig(name="mine"),
    run_dir=Path("/shared/runs/mine"),
    words=("run.toml",),
    work_dir=Path("/shared"),
    nodes=2,
)


def lines(request: RunJob) -> list[str]:
    return Slurm().script(request).splitlines()


def test_a_folder_is_what_it_is_called_in_all_lines():
    folder = Path("/shared/50% of 'my' \"runs\"/$HOME")
    said = lines(replace(REQUEST, run_dir=folder / "mine", work_dir=folder))
    (output,) = [line for line in said if line.startswith("#SBATCH --output=")]
    assert output == '#SBATCH --output="/shared/50%% of \'my\' \\"runs\\"/$HOME/mine/launch/slurm-%j.out"'
    assert f"cd {shlex.quote(str(folder))} || exit 2" in said
    words = shlex.split("\n".join(line for line in said if not line.startswith("#")))
    task = words[words.index("-c") + 1]
    assert f"--run-dir {shlex.quote(str(folder / 'mine'))}; code=$?" in task
    assert shlex.split(said[-1])[-2:] == [str(folder / "mine"), "$?"]


@pytest.mark.parametrize("name", ["a\nb", "a\\b"])
def test_a_folder_that_sbatch_cannot_be_told_is_refused_before_anything_is_made(name):
    with pytest.raises(UserError, match="cannot be given to sbatch"):
        Slurm().check(replace(REQUEST, run_dir=Path("/shared") / name))


def test_more_nodes_in_the_run_than_in_the_job_are_refused_before_it_waits():
    run = RunConfig.model_validate({"launch": {"nodes": 3}})
    with pytest.raises(UserError, match=r"launch\.nodes = 3, and --nodes 2\. Give --nodes 3 or more"):
        Slurm().check(replace(REQUEST, run=run))
    Slurm().check(replace(REQUEST, run=run, nodes=4))


def test_what_is_asked_for_is_in_the_job():
    said = lines(replace(REQUEST, gpus_per_node=8, time="1-00:00:00", extra=("--constraint=h100",)))
    assert {"#SBATCH --nodes=2", "#SBATCH --gpus-per-node=8", "#SBATCH --time=1-00:00:00", "#SBATCH --exclusive",
            "#SBATCH --signal=USR1@90", "#SBATCH --no-kill", "#SBATCH --constraint=h100"} <= set(said)  # fmt: skip


@pytest.mark.parametrize(
    ("signals", "code", "starts"),
    [("TERM $PPID $$", 143, 1), ("USR1 $PPID $$", 138, 1), ("TERM $PPID; kill -KILL $$", 137, 1), ("KILL $$", 137, 5)],
)
def test_a_signal_ends_an_agent_that_does_not_take_it_yet_and_starts_no_other(tmp_path, signals, code, starts):
    agent = f"sh -c 'echo start; kill -{signals}; exit 0'"
    task = AGENT_TASK.format(command=agent, survivor="echo ends with")
    done = subprocess.run(["bash", "-c", task], capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout.splitlines()) == (code, ["start"] * starts + [f"ends with {code}"])


AWAY = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
REFUSED = "sbatch: error: invalid partition specified: nope\nsbatch: error: Batch job submission failed"


def program(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, *, says: str, code: int) -> None:
    """Put a program on the path that answers as one of SLURM's; a real cluster is asked in tests/system."""
    path = folder / name
    path.write_text(f"#!/bin/sh\ncat >&2 <<END\n{says}\nEND\nexit {code}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_a_controller_that_is_away_says_nothing_of_a_job(tmp_path, monkeypatch):
    program(tmp_path, monkeypatch, "squeue", says=AWAY, code=1)
    with pytest.raises(UserError, match=r"squeue says: .*Unable to contact slurm controller"):
        listed("--jobs=4")


def test_only_an_unknown_number_is_a_job_that_has_ended(tmp_path, monkeypatch):
    program(tmp_path, monkeypatch, "squeue", says="slurm_load_jobs error: Invalid job id specified", code=1)
    assert listed("--jobs=4") == []
    assert meaning("") == "ended" and meaning("CANCELLED") == "ended"
    assert meaning("PENDING") == "waiting" and meaning("RUNNING") == "running"
    assert meaning("RESV_DEL_HOLD") == meaning("REQUEUE_FED") == "waiting"
    assert meaning("RESIZING") == "running"  # a word that is not in the table is no end


def prints(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, said: bytes) -> None:
    """Put a program on the path that prints this."""
    (folder / "said").write_bytes(said)
    program(folder, monkeypatch, name, says="", code=0)
    (folder / name).write_text(f"#!/bin/sh\ncat {folder}/said\n")


def known(job_id: str = "7") -> LaunchedJob:
    return LaunchedJob(engine="slurm", id=job_id, submitted_s=0, nodes=1)


@pytest.mark.parametrize("said", [b"7", b"7 RUNNING None\n8\n", b"\x1b"])
def test_half_a_line_of_squeue_says_nothing_of_any_job(tmp_path, monkeypatch, said):
    prints(tmp_path, monkeypatch, "squeue", said)
    with pytest.raises(UserError, match=r"squeue says '.*', which is no job and its state"):
        Slurm().states([known()])


def test_a_reason_in_another_encoding_is_a_reason(tmp_path, monkeypatch):
    prints(tmp_path, monkeypatch, "squeue", "7 PENDING réservé".encode("latin-1"))
    assert Slurm().state(known()) == ("waiting", "pending: r�serv�")


def test_the_number_of_a_job_comes_last_of_what_sbatch_says(tmp_path, monkeypatch):
    asked = replace(REQUEST, run_dir=tmp_path / "runs/mine")
    asked.folder.mkdir(parents=True)
    prints(tmp_path, monkeypatch, "sbatch", b"Welcome to the cluster\n\n--> Verifying queue...OK\n4711;north\n")
    assert Slurm().start(asked).id == "4711"
    prints(tmp_path, monkeypatch, "sbatch", b"Submitted\n")
    with pytest.raises(UserError, match=r"sbatch says no number of a job: 'Submitted'. Look whether squeue"):
        Slurm().start(asked)


def test_each_line_of_a_refusal_stays_a_line(tmp_path, monkeypatch):
    program(tmp_path, monkeypatch, "sbatch", says=REFUSED, code=1)
    with pytest.raises(UserError) as refused:
        ask("sbatch", "job.sh")
    assert str(refused.value).splitlines()[:2] == [
        "--on slurm: sbatch refuses: sbatch: error: invalid partition specified: nope",
        "  sbatch: error: Batch job submission failed",
    ]


def test_values_are_quoted_where_sbatch_would_split_or_replace_them():
    where = output('/data/my runs/50% "a"', "slurm-%j.out")
    assert directives({"output": where, "time": "1:00", "account": ""}) == [
        '#SBATCH --output="/data/my runs/50%% \\"a\\"/slurm-%j.out"',
        "#SBATCH --time=1:00",
    ]


@pytest.mark.parametrize("value", ["a\nscontrol shutdown", "a\\b", "a\x1b[2J"])
def test_a_value_that_cannot_stand_in_a_line_is_refused(value):
    with pytest.raises(UserError, match=r"--on slurm: output = .* cannot be given to sbatch"):
        directives({"output": value})


def program_job(folder: Path, **asked: object) -> ProgramJob:
    return ProgramJob(
        title="argosy-prepare", module="argosy.data.worker", words=(str(folder / "a b"),),
        log=folder / "a b%" / "w.out", work_dir=Path("/shared"), environment={"A": "b c"}, cpus_per_node=2, **asked,
    )  # type: ignore[arg-type]  # fmt: skip


def cluster(folder: Path, monkeypatch: pytest.MonkeyPatch, squeue: str) -> Slurm:
    """A SLURM whose sbatch keeps the script as `sent` and gives number 7, and whose squeue is this script."""
    scripts = {
        "sbatch": f'for last; do :; done; cp "$last" {folder}/sent; (echo "$*"; env) > {folder}/typed; echo 7',
        "squeue": squeue,
        "srun": 'echo "ran $*"',
    }
    for name, text in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return Slurm()


def test_a_program_s_script_has_its_environment_and_no_srun(tmp_path):
    said = Slurm().script(program_job(tmp_path, time="1:00")).splitlines()
    assert f'#SBATCH --output="{tmp_path}/a b%%/slurm-%j.out"' in said
    assert {"#SBATCH --cpus-per-task=2", "#SBATCH --time=1:00", "#SBATCH --requeue", "export A='b c'"} <= set(said)
    assert said[-2:] == ["cd /shared || exit 2", said[-1]]
    assert shlex.split(said[-1])[-3:] == ["-m", "argosy.data.worker", str(tmp_path / "a b")]
    assert not any("srun" in line or "exclusive" in line or "--signal" in line for line in said)


def test_jobs_that_are_started_together_are_an_array(tmp_path, monkeypatch):
    folder = tmp_path / 'a "b" $(touch owned) 5%'
    jobs = [
        RunJob(run=RunConfig(name=f"lr-000{n}"), run_dir=folder / f"000{n}", words=("run.toml",), work_dir=tmp_path,
               cpus_per_node=n + 1, time="1:00")
        for n in range(2)
    ]  # fmt: skip
    for job in jobs:
        job.folder.mkdir(parents=True)
    name = f"$(grep -o -m1 'lr-[0-9a-f]*' {tmp_path}/sent)"
    squeue = f'echo >> {tmp_path}/asked; echo "6_0 RUNNING lr"; echo "7_0 FAILED {name}"; echo "7_1 RUNNING {name}"'
    slurm = cluster(tmp_path, monkeypatch, squeue)
    for name in ("SLURM_CONF", "SLURM_JOB_ID", "SLURM_MEM_PER_CPU"):  # of the job that the sweep runs in
        monkeypatch.setenv(name, "8")
    first, second = slurm.start_all(jobs, at_once=1)
    assert (first.id, second.id) == ("7_0", "7_1") and Path(second.log) == jobs[1].folder / "slurm-7_1.out"
    sent, typed = ((tmp_path / name).read_text() for name in ("sent", "typed"))
    for line in ("--output=/dev/null", "--array=0-1%1", "--time=1:00", "--cpus-per-task=2", "--job-name=lr-"):
        assert f"#SBATCH {line}" in sent
        assert f" {line}" in typed.splitlines()[0], "or a variable such as SBATCH_TIMELIMIT would win"
    assert re.findall(r"^SLURM_\w+", typed, re.MULTILINE) == ["SLURM_CONF"]
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "1"}
    subprocess.run(["bash", tmp_path / "sent"], check=False, cwd=tmp_path, env={**environment, "SLURM_JOB_ID": "7"})
    assert "ran --ntasks-per-node=1" in Path(second.log).read_text() and not Path(first.log).exists()
    assert not list(tmp_path.rglob("owned"))

    assert slurm.find(jobs[0]) is None  # whose starter was killed before it wrote the number down
    found = slurm.find(jobs[1])
    assert found is not None and (found.id, found.log) == (second.id, second.log)
    assert json.loads((jobs[1].folder / "slurm.json").read_text())["task"] == 1
    first.save(jobs[0].run_dir)
    second.save(jobs[1].run_dir)
    assert slurm.find(jobs[0]) is None and slurm.find(jobs[1]) == LaunchedJob.load(jobs[1].run_dir)
    assert len((tmp_path / "asked").read_text().splitlines()) == 1


def test_states_of_many_jobs_are_asked_for_at_once(tmp_path, monkeypatch):
    said = 'echo "$*" >> "$0.asked"; echo "7_0 RUNNING None"; echo "7_1 PENDING Resources"; echo "8 COMPLETED None"'
    slurm = cluster(tmp_path, monkeypatch, said)
    jobs = [LaunchedJob(engine="slurm", id=job_id, submitted_s=0, nodes=1) for job_id in ("7_1", "7_0", "8", "9")]
    assert slurm.states(jobs) == [
        ("waiting", "pending: Resources"), ("running", "running"), ("ended", "completed"),
        ("ended", "no longer known to SLURM"),
    ]  # fmt: skip
    (asked,) = (tmp_path / "squeue.asked").read_text().splitlines()
    assert "--jobs=7,8,9" in asked


def step(nodes: int, tasks: int | None = None) -> dict[str, str]:
    tasks = nodes if tasks is None else tasks
    return {"SLURM_STEP_NUM_TASKS": str(tasks), "SLURM_STEP_NUM_NODES": str(nodes), "SLURMD_NODENAME": "n7"}


def launch(environment: dict[str, str], **given: object) -> LaunchConfig:
    return with_nodes_of_srun(RunConfig(launch=LaunchConfig(**given)), environment).launch  # type: ignore[arg-type]


@pytest.mark.parametrize("environment", [{}, {"SLURM_JOB_ID": "3", "SLURM_PROCID": "0", "SLURM_NNODES": "4"}, step(1)])
def test_one_node_or_a_batch_script_is_a_machine_like_any_other(environment):
    assert launch(environment) == LaunchConfig()


@pytest.mark.parametrize(
    ("given", "made"),
    [
        ({}, {"nodes": 4, "node": "n7", "lease": "folder"}),
        ({"nodes": 3}, {"nodes": 3, "node": "n7", "lease": "folder"}),
        ({"node": "n1"}, {"nodes": 4, "node": "n7", "lease": "folder"}),
        ({"coordinator": "n1:29400"}, {"nodes": 4, "node": "n7", "coordinator": "n1:29400"}),
        ({"lease": "etcd://h1:2379"}, {"nodes": 4, "node": "n7", "lease": "etcd://h1:2379"}),
    ],
)
def test_the_nodes_are_those_of_the_step(given, made):
    assert launch(step(4), **given) == LaunchConfig(**made)


def test_what_cannot_be_meant_is_refused():
    with pytest.raises(UserError, match=r"8 tasks on 4 nodes.*--ntasks-per-node=1"):
        launch(step(4, tasks=8))
    with pytest.raises(UserError, match=r"launch\.nodes = 8, and srun has started 4.*--nodes=8"):
        launch(step(4), nodes=8)
