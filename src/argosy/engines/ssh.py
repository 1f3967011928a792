"""ssh: a list of hosts, each with an agent that is held there and that lives on when this machine has gone away.

All goes through the system's ssh, so its configuration, keys and agent are the user's. Before anything is started, all
hosts are asked what they see: the folders, Python, and by which address they were reached, which the others are told.
"""

from __future__ import annotations

import os
import re
import secrets
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path

from argosy.config.launch import is_loopback
from argosy.engines.engine import PROGRAM_ANSWER_S, Engine, Job, RunJob
from argosy.engines.record import STOP_FILE, JobState, LaunchedJob
from argosy.errors import UserError
from argosy.processes.secret import SECRET_FILE_VARIABLE, SECRET_VARIABLE, secret_of

SSH_CONNECT_S = 10
SSH_HOST = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9_.-]*@)?[A-Za-z0-9_][A-Za-z0-9_.-]*")
"""A name that ssh takes: an option, which begins with "-", is none."""
HOSTS_AT_ONCE = 32
"""Hosts that are asked at a time."""
ECHO_MARK = "argosy:"
NO_WAY = 255
"""Exit code of ssh if it could not reach the host; else it is the script's."""
HOST_PROCESS = re.compile(r"[1-9][0-9]{0,9}@[0-9]{1,20}")
PASSED_ON = (
    *("ARGOSY_", "OMP_", "NCCL_", "GLOO_", "UCX_", "TORCH", "PYTORCH_", "CUDA_", "HF_", "PYTHONPATH"),
    *("AWS_", "GOOGLE_", "AZURE_", "WANDB_", "MLFLOW_", "TRACKIO_", "OTEL_"),
)
"""Environment variables that begin so are those of the agents too. They go through ssh's input: the words of a command
can be read by all users of a machine."""
AGENT_MARK = "agent of "
"""Prefix of the entry in a job's place that names the process of a host's agent."""
LOOK = """\
printf 'argosy:boot=%s\\n' "$(cat /proc/sys/kernel/random/boot_id)"
printf 'argosy:reached=%s\\n' "$SSH_CONNECTION"
[ -d {work_dir} ] && echo argosy:work_dir=yes
[ -f {marker} ] && echo argosy:run_dir=yes
[ -x {python} ] && echo argosy:python=yes
true
"""
START_ON_HOST = """\
cd {work_dir} || exit 2
{exports}
nohup setsid {command} >> {log} 2>&1 < /dev/null &
sleep 0.2
started=$(sed 's/.*) //' /proc/$!/stat 2>/dev/null | cut -d' ' -f20)
[ -n "$started" ] || {{ echo "it ended at once: $(tail -n 1 {log} 2>&1)" >&2; exit 1; }}
echo "$!@$started" > {agent}
printf 'argosy:agent=%s@%s\\n' $! "$started"
"""
IS_THERE = """\
set -- $(sed 's/.*) //' /proc/{pid}/stat 2>/dev/null)
[ "${{20:-}}" = {started} ] && [ "$1" != Z ]"""
"""True if the process is there that had this number when it was started: field 22 of proc(5), after the command."""
END_ON_HOST = IS_THERE + " && kill -TERM {pid}\ntrue"
READ_NOTE = "IFS=@ read -r pid started < {agent} || exit 0\n"
"""Reads which process is the agent of a host whose answer was lost."""


class Ssh(Engine):
    """Hosts that ssh reaches without a password, with a folder that all of them and this machine see."""

    name = "ssh"
    takes = frozenset(("hosts", "gpus_per_node", "extra"))
    needs_seal = True
    starts_programs = False

    def check(self, job: RunJob) -> None:
        """Raises: UserError for hosts that are missing, no names, or there twice."""
        super().check(job)
        _hosts(job)

    def check_job(self, job: LaunchedJob) -> None:
        """Raises: UserError for what is no host, or no process."""
        for host in job.id.split(","):
            job.check(id=(host, SSH_HOST))
        for name, agent in job.place.items():
            if name.startswith(AGENT_MARK):
                job.check(host=(name.removeprefix(AGENT_MARK), SSH_HOST), agent=(agent, HOST_PROCESS))

    def script(self, job: RunJob) -> str:
        folder = shlex.quote(str(job.work_dir))
        return "".join(
            f"# {host}\ncd {folder} && {_command(job, host, 'the address of ' + host)}\n" for host in _hosts(job)
        )

    def start(self, job: Job) -> LaunchedJob:
        """Start an agent on each host, if all can be reached and see the run's folder."""
        assert isinstance(job, RunJob)
        hosts, options = _hosts(job), list(job.extra)
        (job.folder / STOP_FILE).unlink(missing_ok=True)
        exports = "\n".join(f"export {name}={shlex.quote(value)}" for name, value in environment_of(job).items())
        seen = _look(job, hosts, options)
        log = {host: job.folder / f"{_node(host)}.out" for host in hosts}
        noted = {host: shlex.quote(str(job.folder / f"{_node(host)}.agent")) for host in hosts}
        scripts = {
            host: START_ON_HOST.format(
                work_dir=shlex.quote(str(job.work_dir)),
                exports=exports,
                command=_command(job, host, seen[host].address),
                log=shlex.quote(str(log[host])),
                agent=noted[host],
            )
            for host in hosts
        }
        answers = ask_all(scripts, options)
        agents = {host: answer.said["agent"] for host, answer in answers.items() if "agent" in answer.said}
        place = {"options": shlex.join(options), **{f"{AGENT_MARK}{host}": agent for host, agent in agents.items()}}
        launched = LaunchedJob.submitted(self.name, ",".join(hosts), len(hosts), job.folder, place)
        if missing := [f"{host} ({answers[host].problem})" for host in hosts if host not in agents]:
            end = {"pid": "$pid", "started": "$started"}
            lost = [host for host in hosts if host not in agents]
            ask_all({host: (READ_NOTE + END_ON_HOST).format(agent=noted[host], **end) for host in lost}, options)
            self.stop(launched)
            raise UserError(f"--on ssh: the agent could not be started on {', '.join(missing)}. The others are ended.")
        return launched

    def state(self, job: LaunchedJob) -> tuple[JobState, str]:
        """Return on how many of its hosts the job's agents are there."""
        answers = self._ask(job, IS_THERE + " && echo argosy:is_there=yes\ntrue")
        there = [host for host, answer in answers.items() if "is_there" in answer.said]
        away = unreachable(answers)
        words = f"on {len(there)} of {job.nodes} hosts" + (f"; no way to {away}" if away else "")
        if there:
            return "running", words
        return ("unknown", f"no way to {away}") if away else ("ended", "")

    def stop(self, job: LaunchedJob) -> None:
        """Send SIGTERM to the agents. Raises: UserError with the hosts that cannot be reached."""
        (Path(job.log) / STOP_FILE).touch()
        answers = self._ask(job, END_ON_HOST)
        if away := unreachable(answers):
            raise UserError(f"there is no way to {away}. The other hosts' agents save and end.")

    def files(self, job: LaunchedJob) -> dict[str, Path]:
        return {_node(host): Path(job.log) / f"{_node(host)}.out" for host in job.id.split(",")}

    @staticmethod
    def _ask(job: LaunchedJob, script: str) -> dict[str, Answer]:
        """Ask the host of each agent, with {pid} and {started} of that agent."""
        scripts = {}
        for name, agent in job.place.items():
            if name.startswith(AGENT_MARK):
                pid, _, started = agent.partition("@")
                scripts[name.removeprefix(AGENT_MARK)] = script.format(pid=int(pid), started=int(started))
        return ask_all(scripts, shlex.split(job.place.get("options", "")))


@dataclass(frozen=True)
class _Seen:
    machine: str
    address: str
    """The host's own, by which it was reached."""
    port: str


def _hosts(job: RunJob) -> list[str]:
    hosts = [host.strip() for host in job.hosts.split(",") if host.strip()]
    if not hosts:
        raise UserError("--on ssh: no hosts are given. Name them, e.g. --hosts node1,node2.")
    for host in hosts:
        if not SSH_HOST.fullmatch(host):
            raise UserError(f"--hosts: {host!r} is no name of a host. Try NAME or USER@NAME, as ssh takes it.")
    nodes = [_node(host) for host in hosts]
    if twice := sorted({node for node in nodes if nodes.count(node) > 1}):
        raise UserError(f"--hosts: {', '.join(twice)} is given twice, and a host has one agent. Name each host once.")
    if job.run.launch.nodes > len(hosts):
        raise UserError(
            f"launch.nodes = {job.run.launch.nodes}, and --hosts names {len(hosts)}. Name as many hosts or more "
            "(the others are spares), or leave launch.nodes out."
        )
    return hosts


def _node(host: str) -> str:
    return host.rpartition("@")[2]


def _command(job: RunJob, host: str, address: str) -> str:
    """Return the words, quoted for a shell, that hold the agent of a host."""
    launch, hosts = job.run.launch, _hosts(job)
    words = []
    if len(hosts) > 1:
        nodes = len(hosts) if launch.nodes == 1 else launch.nodes
        words = ["--launch.nodes", str(nodes), "--launch.node", _node(host)]
        words += [] if launch.address else ["--launch.address", address]
        words += [] if launch.coordinator or launch.lease else ["--launch.lease", "folder"]
    words += ["--launch.processes", str(job.gpus_per_node)] if job.gpus_per_node else []
    supervisor = shlex.join([sys.executable, "-m", "argosy.launch.agent_supervisor", str(job.run_dir)])
    return f"{supervisor} {job.command} {shlex.join(words)}".strip()


def environment_of(job: RunJob) -> dict[str, str]:
    """Return what is added to the agents' environment: the variables that are passed on, those that the run's alerts
    name, and the run's secret if it is not in the run's folder."""
    alerts = job.run.observe.alerts
    named = {alerts.webhook_env, alerts.headers_env}
    found = {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(PASSED_ON) or name in named
        if name != SECRET_FILE_VARIABLE
    }
    if SECRET_VARIABLE in os.environ or SECRET_FILE_VARIABLE in os.environ:
        found[SECRET_VARIABLE] = secret_of(job.run_dir).decode()
    return found


def _look(job: RunJob, hosts: list[str], options: list[str]) -> dict[str, _Seen]:
    """Return what is seen of each host. Raises: UserError if one cannot take part."""
    marker = job.folder / f"seen-{secrets.token_hex(8)}"
    marker.touch()
    try:
        script = LOOK.format(
            work_dir=shlex.quote(str(job.work_dir)),
            marker=shlex.quote(str(marker)),
            python=shlex.quote(sys.executable),
        )
        answers = ask_all(dict.fromkeys(hosts, script), options)
    finally:
        marker.unlink()
    if away := unreachable(answers):
        raise UserError(f"--on ssh: there is no way to {away}. `ssh HOST true` must work without a password.")
    needs = {"work_dir": job.work_dir, "run_dir": job.run_dir, "python": sys.executable}
    for name, path in needs.items():
        if blind := [host for host, answer in answers.items() if name not in answer.said]:
            raise UserError(
                f"--on ssh: {', '.join(blind)} does not see {path}. All hosts need the folder where the command is "
                "given, the run's folder and Python under the same path: a shared disk."
            )
    return _distinct({host: _seen(host, answer) for host, answer in answers.items()})


def _seen(host: str, answer: Answer) -> _Seen:
    _, _, address, port, *_ = (*answer.said.get("reached", "").split(), *repeat("", 4))
    if not port:
        raise UserError(
            f"--on ssh: {host} does not say at which address it was reached: its ssh server sets no SSH_CONNECTION. "
            "Have OpenSSH serve it."
        )
    return _Seen(answer.said.get("boot", ""), address, port)


def _distinct(seen: dict[str, _Seen]) -> dict[str, _Seen]:
    """Raises: UserError if two names are one host, or a host was reached by an address that only it can use."""
    names: dict[_Seen, str] = {}
    for host, found in seen.items():
        if found in names:
            raise UserError(f"--hosts: {names[found]} and {host} are the same host. Name each host once.")
        names[found] = host
    local = [host for host, found in seen.items() if is_loopback(found.address.partition("%")[0])]
    if local and len({found.machine for found in seen.values()}) > 1:
        raise UserError(
            f"--hosts: ssh reached {', '.join(local)} at {seen[local[0]].address}, which the other hosts cannot reach. "
            "Name it by its name or address on their network; /etc/hosts or ssh_config may say localhost for it."
        )
    return seen


@dataclass(frozen=True)
class Answer:
    """The answer of a host."""

    said: dict[str, str] = field(default_factory=dict)
    problem: str = ""
    """The message of ssh or of the script if it failed."""
    is_reached: bool = True


def ask_all(scripts: Mapping[str, str], options: Sequence[str]) -> dict[str, Answer]:
    """Run a script of bash on each host. options: of ssh.

    Raises: UserError if there is no ssh here.
    """
    if shutil.which("ssh") is None:
        raise UserError("--on ssh: there is no ssh here. Install it, e.g. apt-get install openssh-client.")
    with ThreadPoolExecutor(HOSTS_AT_ONCE) as threads:
        answers = threads.map(lambda host: _ask(host, scripts[host], options), scripts)
        return dict(zip(scripts, answers, strict=True))


def unreachable(answers: Mapping[str, Answer]) -> str:
    """Return the hosts that ssh did not reach, each with what it said; empty if it reached all."""
    return ", ".join(f"{host} ({answer.problem})" for host, answer in answers.items() if not answer.is_reached)


def command(host: str, options: Sequence[str], text: str) -> list[str]:
    """Return the words of ssh that give a shell's command on a host. options: of ssh."""
    own = ["-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={SSH_CONNECT_S}"]
    return ["ssh", *own, *options, "--", host, text]


def _ask(host: str, script: str, options: Sequence[str]) -> Answer:
    try:
        done = subprocess.run(
            command(host, options, "bash -s"),
            input=script,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PROGRAM_ANSWER_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Answer(problem=f"no answer within {PROGRAM_ANSWER_S:.0f} s", is_reached=False)
    # What a shell's start file prints may have no end of line.
    marked = (line.partition(ECHO_MARK) for line in done.stdout.splitlines())
    lines = [rest.partition("=") for _, mark, rest in marked if mark]
    problem = " ".join(done.stderr.split()) or f"exit code {done.returncode}" if done.returncode else ""
    return Answer({name: value for name, _, value in lines}, problem, done.returncode != NO_WAY)
