"""ssh: a list of hosts, each with an agent that is held there and that lives on when this machine has gone away.

All goes through the system's ssh, so its configuration, keys and agent are the user's. Before anything is started, all
hosts are asked what they see: the folders, Python, and by which address they were reached, which the others are told.
"""

from __future__ import annotations

import os
import re
import secrets
import shlex
import sys
import time
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from argosy.errors import UserError
from argosy.launch.engines.engine import Engine, LaunchRequest
from argosy.launch.engines.job import JobState, LaunchedJob
from argosy.launch.engines.keeper import STOP
from argosy.launch.engines.ssh_hosts import HOST, Answer, ask_all, unreachable
from argosy.processes.secret import FILE, VALUE, secret_of

PROCESS = re.compile(r"[1-9][0-9]{0,9}@[0-9]{1,20}")
PASSED_ON = ("ARGOSY_", "OMP_", "NCCL_", "GLOO_", "UCX_", "TORCH", "PYTORCH_", "CUDA_", "HF_", "AWS_", "PYTHONPATH")
"""Environment variables that begin so are those of the agents too. They go through ssh's input: the words of a command
can be read by all users of a machine."""
AGENT = "agent of "
"""In a job's place: begins what says which process a host's agent is."""
LOOK = """\
printf 'argosy:boot=%s\\n' "$(cat /proc/sys/kernel/random/boot_id)"
printf 'argosy:reached=%s\\n' "$SSH_CONNECTION"
[ -d {work_dir} ] && echo argosy:work_dir=yes
[ -f {marker} ] && echo argosy:run_dir=yes
[ -x {python} ] && echo argosy:python=yes
true
"""
START = """\
cd {work_dir} || exit 2
{exports}
nohup setsid {command} >> {log} 2>&1 < /dev/null &
sleep 0.2
printf 'argosy:agent=%s@%s\\n' $! "$(sed 's/.*) //' /proc/$!/stat | cut -d' ' -f20)"
"""
IS_THERE = """\
set -- $(sed 's/.*) //' /proc/{pid}/stat 2>/dev/null)
[ "${{20:-}}" = {started} ] && [ "$1" != Z ]"""
"""True if the process is there that had this number when it was started: field 22 of proc(5), after the command."""


class Ssh(Engine):
    """Hosts that ssh reaches without a password, with a folder that all of them and this machine see."""

    name = "ssh"
    takes = frozenset(("hosts", "gpus_per_node", "extra"))
    needs_seal = True

    def check(self, request: LaunchRequest) -> None:
        """Raises: UserError for hosts that are missing, no names, or there twice."""
        super().check(request)
        _hosts(request)

    def check_job(self, job: LaunchedJob) -> None:
        """Raises: UserError for what is no host, or no process."""
        for host in job.id.split(","):
            job.check(id=(host, HOST))
        for name, agent in job.place.items():
            if name.startswith(AGENT):
                job.check(host=(name.removeprefix(AGENT), HOST), agent=(agent, PROCESS))

    def script(self, request: LaunchRequest) -> str:
        """Return the command of each host."""
        folder = shlex.quote(str(request.work_dir))
        return "".join(
            f"# {host}\ncd {folder} && {_command(request, host, 'the address of ' + host)}\n"
            for host in _hosts(request)
        )

    def submit(self, request: LaunchRequest) -> LaunchedJob:
        """Start an agent on each host, if all can be reached and see the run's folder."""
        hosts, options = _hosts(request), list(request.extra)
        (request.folder / STOP).unlink(missing_ok=True)
        exports, seen = _exports(request.run_dir), _look(request, hosts, options)
        log = {host: request.folder / f"{_node(host)}.out" for host in hosts}
        scripts = {
            host: START.format(
                work_dir=shlex.quote(str(request.work_dir)),
                exports=exports,
                command=_command(request, host, seen[host].address),
                log=shlex.quote(str(log[host])),
            )
            for host in hosts
        }
        answers = ask_all(scripts, options)
        agents = {host: answer.said["agent"] for host, answer in answers.items() if "agent" in answer.said}
        job = LaunchedJob(
            engine=self.name,
            id=",".join(hosts),
            submitted_s=round(time.time(), 3),
            nodes=len(hosts),
            log=str(request.folder),
            place={"options": shlex.join(options), **{f"{AGENT}{host}": agent for host, agent in agents.items()}},
        )
        if missing := [f"{host} ({answers[host].problem})" for host in hosts if host not in agents]:
            self.stop(job)
            raise UserError(f"--on ssh: the agent could not be started on {', '.join(missing)}. The others are ended.")
        return job

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
        (Path(job.log) / STOP).touch()
        answers = self._ask(job, IS_THERE + " && kill -TERM {pid}\ntrue")
        if away := unreachable(answers):
            raise UserError(f"there is no way to {away}. The other hosts' agents save and end.")

    def files(self, job: LaunchedJob) -> dict[str, Path]:
        """Return a file for each host."""
        return {_node(host): Path(job.log) / f"{_node(host)}.out" for host in job.id.split(",")}

    @staticmethod
    def _ask(job: LaunchedJob, script: str) -> dict[str, Answer]:
        """Ask the host of each agent, with {pid} and {started} of that agent."""
        scripts = {}
        for name, agent in job.place.items():
            if name.startswith(AGENT):
                pid, _, started = agent.partition("@")
                scripts[name.removeprefix(AGENT)] = script.format(pid=int(pid), started=int(started))
        return ask_all(scripts, shlex.split(job.place.get("options", "")))


@dataclass(frozen=True)
class _Seen:
    machine: str
    address: str
    """The host's own, by which it was reached."""
    port: str


def _hosts(request: LaunchRequest) -> list[str]:
    hosts = [host.strip() for host in request.hosts.split(",") if host.strip()]
    if not hosts:
        raise UserError("--on ssh: no hosts are given. Name them, e.g. --hosts node1,node2.")
    for host in hosts:
        if not HOST.fullmatch(host):
            raise UserError(f"--hosts: {host!r} is no name of a host. Try NAME or USER@NAME, as ssh takes it.")
    nodes = [_node(host) for host in hosts]
    if twice := sorted({node for node in nodes if nodes.count(node) > 1}):
        raise UserError(f"--hosts: {', '.join(twice)} is given twice, and a host has one agent. Name each host once.")
    if request.run.launch.nodes > len(hosts):
        raise UserError(
            f"launch.nodes = {request.run.launch.nodes}, and --hosts names {len(hosts)}. Name as many hosts or more "
            "(the others are spares), or leave launch.nodes out."
        )
    return hosts


def _node(host: str) -> str:
    return host.rpartition("@")[2]


def _command(request: LaunchRequest, host: str, address: str) -> str:
    """Return the words, quoted for a shell, that hold the agent of a host."""
    launch, hosts = request.run.launch, _hosts(request)
    words = []
    if len(hosts) > 1:
        nodes = len(hosts) if launch.nodes == 1 else launch.nodes
        words = ["--launch.nodes", str(nodes), "--launch.node", _node(host)]
        words += [] if launch.address else ["--launch.address", address]
        words += [] if launch.coordinator or launch.lease else ["--launch.lease", "folder"]
    words += ["--launch.processes", str(request.gpus_per_node)] if request.gpus_per_node else []
    keeper = shlex.join([sys.executable, "-m", "argosy.launch.engines.keeper", str(request.run_dir)])
    return f"{keeper} {request.command} {shlex.join(words)}".strip()


def _exports(run_dir: Path) -> str:
    """Return what sets the agents' environment: the variables that are passed on, and the run's secret if it is not in
    the run's folder."""
    found = {name: value for name, value in os.environ.items() if name.startswith(PASSED_ON) and name != FILE}
    if VALUE in os.environ or FILE in os.environ:
        found[VALUE] = secret_of(run_dir).decode()
    return "\n".join(f"export {name}={shlex.quote(value)}" for name, value in sorted(found.items()))


def _look(request: LaunchRequest, hosts: list[str], options: list[str]) -> dict[str, _Seen]:
    """Return what is seen of each host. Raises: UserError if one cannot take part."""
    marker = request.folder / f"seen-{secrets.token_hex(8)}"
    marker.touch()
    try:
        script = LOOK.format(
            work_dir=shlex.quote(str(request.work_dir)),
            marker=shlex.quote(str(marker)),
            python=shlex.quote(sys.executable),
        )
        answers = ask_all(dict.fromkeys(hosts, script), options)
    finally:
        marker.unlink()
    if away := unreachable(answers):
        raise UserError(f"--on ssh: there is no way to {away}. `ssh HOST true` must work without a password.")
    needs = {"work_dir": request.work_dir, "run_dir": request.run_dir, "python": sys.executable}
    for name, path in needs.items():
        if blind := [host for host, answer in answers.items() if name not in answer.said]:
            raise UserError(
                f"--on ssh: {', '.join(blind)} does not see {path}. All hosts need the folder where the command is "
                "given, the run's folder and Python under the same path: a shared disk."
            )
    return _distinct({host: _seen(answer) for host, answer in answers.items()})


def _seen(answer: Answer) -> _Seen:
    _, _, address, port = answer.said["reached"].split()
    return _Seen(answer.said["boot"], address, port)


def _distinct(seen: dict[str, _Seen]) -> dict[str, _Seen]:
    """Raises: UserError if two names are one host, or a host was reached by an address that only it can use."""
    names: dict[_Seen, str] = {}
    for host, found in seen.items():
        if found in names:
            raise UserError(f"--hosts: {names[found]} and {host} are the same host. Name each host once.")
        names[found] = host
    local = [host for host, found in seen.items() if ip_address(found.address.partition("%")[0]).is_loopback]
    if local and len({found.machine for found in seen.values()}) > 1:
        raise UserError(
            f"--hosts: ssh reached {', '.join(local)} at {seen[local[0]].address}, which the other hosts cannot reach. "
            "Name it by its name or address on their network; /etc/hosts or ssh_config may say localhost for it."
        )
    return seen
