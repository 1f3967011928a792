"""The run's folder: whether it is one or may become one, its lock, whether it holds the requested run, and its storage.

Two things hold a run together there, which are tried before anything is trained: a lock that one process has at a time
and that ends with it (`flock`), and folders that get their name at once (`rename`), which is how a checkpoint is
committed.
"""

from __future__ import annotations

import errno
import fcntl
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, TextIO

from argosy.checkpoint import store
from argosy.checkpoint.checksums import DamagedCheckpoint
from argosy.checkpoint.fence import CLAIMS, NAME_FILE, OLD_FILES
from argosy.checkpoint.remote import plan_there
from argosy.config.dump import save_run
from argosy.config.extend import ExtendConfig
from argosy.config.identity import is_under, lasting_values
from argosy.config.load import load
from argosy.config.schema import RunConfig
from argosy.data.manifest import DATA_MANIFEST as MANIFEST
from argosy.data.manifest import TEMPLATE, TOKENIZER
from argosy.data.stores.store import spelled
from argosy.data.tokenizer import USAGE, usage_of
from argosy.engines.record import LAUNCH_FOLDER as LAUNCH
from argosy.errors import RunFailed, StorageError, UserError, some_of
from argosy.files import RUN_LOCK, MadeFolder, atomic_write, holder_here, lock_or_holder, made_folder, make_folder
from argosy.launch.devices import check_compiler
from argosy.launch.resolve import check_memory, with_known_sizes
from argosy.observe.report import Report
from argosy.plan.plan import Plan, is_asynchronous
from argosy.plan.search.auto import Devices, choose_with_reasons, other_choice, plan_to_go_on
from argosy.processes.secret import SECRET_FILE as SECRET
from argosy.processes.secret import TLS_FOLDER as TLS
from argosy.supervise.lease.lease import LEASE_FOLDER as COORDINATORS
from argosy.supervise.nodes import HANDOVER_FILE as MEMBERSHIP
from argosy.sync.layout import SITES, home_of, site_folder
from argosy.sync.ledger import LEDGER_FILE as LEDGER
from argosy.sync.length import check_length

OF_A_START = (f"{RUN_LOCK}*", ".settling", SECRET, NAME_FILE, f"{CLAIMS}*", *(f"{name}*" for name in OLD_FILES),
              COORDINATORS, f"{TLS}*", ".storage-*", f"{TOKENIZER}*", "run.toml*", "plan.toml*", MEMBERSHIP, "logs",
              "events", "checkpoints", "metrics.jsonl", "extend", LAUNCH, "sites", LEDGER, "asked.toml",
              store.ACCEPTED, *(f"{name}*" for name in USAGE))  # fmt: skip
"""Names of what a run that was interrupted while it started may have left."""


def refuse_others(folder: Path, names: Sequence[str], kind: str) -> None:
    """Raise UserError if `folder`, which is to be that of a run or a sweep, holds files of these names."""
    if names:
        raise UserError(
            f"{folder} is not the folder of a {kind}: it holds {some_of(names, 3)}. Give --{kind}-dir a folder that is "
            f"new or empty, or that of a {kind} to go on with."
        )


@contextmanager
def making_folder(run_dir: Path, nodes: int) -> Iterator[MadeFolder]:
    """Make the folder of a run, if there is none. After a UserError in the block, remove what a new run has left there.

    nodes: with several machines, nothing is removed: others may be in the folder.
    Raises: UserError if the path is that of a file, holds files that are not a run's, or cannot be made.
    """
    check_is_run_folder(run_dir)
    with _making(run_dir, lambda: nodes > 1 or _is_begun(run_dir)) as folder:
        yield folder


@contextmanager
def making_home(home: Path) -> Iterator[None]:
    """Make the folder of a run of several parts. After a UserError in the block, remove it if it is new, and no part of
    the run is in it. Raises: UserError if it cannot be made.
    """
    with _making(home, lambda: _is_begun(home) or any((home / SITES).glob("*"))):
        yield


@contextmanager
def _making(path: Path, is_used: Callable[[], bool]) -> Iterator[MadeFolder]:
    """Make a folder, if there is none. After a UserError in the block, remove it if it is new, and not used by then."""
    with ExitStack() as made:
        try:
            folder = made.enter_context(made_folder(path))
        except OSError as problem:
            raise _cannot_be_made(path, problem) from None
        try:
            yield folder
        finally:
            folder.is_kept = folder.is_kept or is_used()


def check_is_run_folder(run_dir: Path) -> None:
    """Raise UserError if `run_dir` is there, and is neither empty nor the folder of a run."""
    try:
        names = {path.name for path in run_dir.iterdir()}
    except FileNotFoundError:
        return
    except OSError as problem:
        raise _cannot_be_made(run_dir, problem) from None
    if {"run.toml", "plan.toml"} <= names or store.committed(run_dir):
        return
    has_lock = any(fnmatch(name, f"{RUN_LOCK}*") for name in names)  # a run.toml alone may be the user's
    others = sorted(
        name
        for name in names
        if not any(fnmatch(name, own) for own in OF_A_START) or (name == "run.toml" and not has_lock)
    )
    refuse_others(run_dir, others, "run")


def _cannot_be_made(run_dir: Path, problem: OSError) -> UserError:
    at = next((folder for folder in (run_dir, *run_dir.parents) if folder.exists()), run_dir)
    if not at.is_dir():
        return UserError(f"{run_dir}: {at} is a file, and a run needs a folder. Choose another with --run-dir.")
    return UserError(
        f"{run_dir}: the folder cannot be used ({problem.strerror}). Get the right to write in {at}, or choose another "
        "with --run-dir."
    )


def _is_begun(run_dir: Path) -> bool:
    metrics = run_dir / "metrics.jsonl"
    return bool(store.committed(run_dir)) or (metrics.exists() and metrics.stat().st_size > 0)


CODE = "extend"
"""The part of a run's folder with copies of the user's code, by their checksums: the older ones stay."""
IN_USE = "{} is in use by {}. Wait for it, or give this run another folder with --run-dir."
NEVER_CHANGED = ("model", "sync.local_steps")
"""Keys that even `--accept-changes` cannot change: the checkpoint would not fit."""
WEIGHTS_KEY = "model.weights"
"""The weights that a run began with fit its checkpoints wherever they lie now, but others make another run."""


@contextmanager
def locked(run_dir: Path, node: str = "", nodes: int = 1) -> Iterator[None]:
    """Lock the run's folder for this process; the kernel releases the lock when the process dies.

    With `node`, which is one of `nodes` machines, lock only that node's part. A new folder is made, and is removed
    again if the block raises UserError.
    Raises: UserError if another process holds the lock, the folder is not a run's, or the storage cannot hold a run.
    """
    with making_folder(run_dir, nodes) as folder:
        check_storage(run_dir, nodes)
        with _lock_file(run_dir / (f"{RUN_LOCK}-{node}" if node else RUN_LOCK)) as file:
            # Of a command for one machine where this is for several, and the other way round.
            others = [run_dir / RUN_LOCK] if node else sorted(run_dir.glob(f"{RUN_LOCK}-*"))
            if (holder := lock_or_holder(file) or holder_here(others)) is not None:
                folder.is_kept = True  # it was found empty, and another process was faster
                raise UserError(IN_USE.format(run_dir, f"process {holder}"))
            yield


def _lock_file(path: Path) -> TextIO:
    try:
        return path.open("a+")
    except OSError as problem:
        raise UserError(f"{path}: cannot be written ({problem.strerror}). Is the run another user's?") from None


@contextmanager
def settling(run_dir: Path) -> Iterator[None]:
    """Let one node at a time prepare data and settle the run; the others wait, and find it done."""
    with (run_dir / ".settling").open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def check_parts(run_dir: Path, run: RunConfig) -> None:
    """Refuse a folder whose state lies where `run` would not look for it: in its sites' folders, or in its own.

    run_dir: that of the whole run, or of a site. Raises: UserError.
    """
    home = home_of(site_folder(run_dir, run.site)) if run.site else run_dir
    own, of_sites = store.committed(home), [f for f in sorted((home / SITES).glob("*")) if store.committed(f)]
    begins = 'Use --run-dir for a folder of its own; there, model.weights = "{}" begins with these weights.'
    if run.sites and not is_asynchronous(run.plan):
        if own:
            raise UserError(
                f"{home} holds a run whose checkpoints, the last at step {own[-1].step}, are not those of sites that "
                f"agree every so many steps. {begins.format(home)}"
            )
    elif of_sites:
        raise UserError(
            f"{home} holds a run of sites that agree every so many steps, with checkpoints in {of_sites[0]}; this run "
            f"{'is asynchronous' if run.sites else 'has no [[sites]]'}. {begins.format(of_sites[0])}"
        )


def enter(run_dir: Path, run: RunConfig, data_identity: str, accept_changes: bool) -> RunConfig:
    """Return the configuration to go on with in `run_dir`: `run`, if it fits the state that is there.

    A number of steps that the folder's run has chosen for the same budget of minutes is kept.
    Raises: UserError, which names what differs from the run in the folder.
    """
    checkpoints = store.committed(run_dir)
    if run.site and not is_asynchronous(run.plan):
        check_length(run_dir, run, max((one.step for one in checkpoints), default=0))
    if not checkpoints:
        if accept_changes and run.checkpoint.remote:  # what is there is known once it is fetched
            (run_dir / store.ACCEPTED).write_text(data_identity)
        return run
    before, step = load(run_dir / "run.toml"), checkpoints[-1].step
    changed = _differences(before, run)
    fatal = {key: values for key, values in changed.items() if is_under(key, NEVER_CHANGED) and key != WEIGHTS_KEY}
    if (identity := _data_identity(checkpoints)) not in (None, data_identity):
        changed["data"] = (f"prepared data {identity}", f"prepared data {data_identity}")
    if changed and (fatal or not accept_changes):
        lines = [f"  {key}: {old} in the folder, {new} now" for key, (old, new) in changed.items()]
        if "data.sources" in changed:
            lines.append(f"  To mix otherwise from now on, keep them and give [[data.stages]] with from_step = {step}:")
            lines.append("  other data.sources deal out all samples anew, and some are read again or left out.")
        if run.train.batches.before(step) > before.train.batches.before(step):
            lines.append(f"  To leave none out, give [[train.batch_ramp]] with until_step = {step} and the old batch.")
        remedy = "" if fatal else ", or --accept-changes to go on from its checkpoint with what is new"
        lines.append(f"  Use --run-dir for a folder of its own{remedy}.")
        raise UserError("\n".join([f"{run_dir} holds another run, at step {step}:", *lines]))
    if 0 < run.train.steps < step and not is_asynchronous(run.plan):
        raise UserError(
            f"train.steps = {run.train.steps}: {run_dir} is longer already, at step {step}. Give --train.steps {step} "
            "to end it there, more to go on, or --run-dir for another run."
        )
    if not run.train.steps and run.train.minutes == before.train.minutes:
        run = run.with_keys(train={"steps": before.train.steps})
    return run


def write(run_dir: Path, run: RunConfig, plan: Plan, data: Sequence[Path]) -> RunConfig:
    """Write run.toml, plan.toml and copies of the tokenizer and of the user's code to the folder.

    It can then be used without the data, and goes on with the code that it began with. With the tokenizer go what the
    weights that the run starts from say of its use (`usage_of`), and the template of conversations. data: the folders
    that have both; some may hold plain text, without a template. A plan that is replaced is kept as plan-STEP.toml.
    Returns the run with the code that was copied. Raises: StorageError if the disk is full.
    """
    try:
        with atomic_write(run_dir / TOKENIZER) as file:
            file.write((data[0] / TOKENIZER).read_bytes())
        for name, text in usage_of(run.model.weights).items() if run.model.weights else ():
            with atomic_write(run_dir / name) as file:
                file.write(text)
        templates = [path for folder in data if (path := folder / TEMPLATE).is_file()]
        if run.train.objective != "pretrain" and templates:
            with atomic_write(run_dir / TEMPLATE) as file:  # that of the data: it may be another than the weights'
                file.write(templates[0].read_bytes())
        run = _with_copied_code(run_dir, run)
        of_this_machine = {"node": "", "address": ""} if run.launch.nodes > 1 else {}  # all others read the file too
        save_run(run.with_keys(launch=of_this_machine), run_dir / "run.toml")
        _write_plan(run_dir, plan)
    except OSError as problem:
        raise StorageError(
            f"{run_dir}: cannot be written ({problem}). Free some space, or choose another disk."
        ) from None
    return run


def _with_copied_code(run_dir: Path, run: RunConfig) -> RunConfig:
    """Copy the user's files to the folder, as they were when checked. Return the run that names the copies."""
    if not run.extend.code:
        return run
    copies = []
    for code in run.extend.code:
        if code.module is None:
            copies.append(run_dir.absolute() / CODE / code.sha256[:8] / code.name)
            make_folder(copies[-1].parent)
            with atomic_write(copies[-1]) as file:
                file.write(code.source)
    extend = ExtendConfig(files=tuple(copies), packages=run.extend.packages, sha256=run.extend.checksums)
    return run.model_copy(update={"extend": extend})


def _write_plan(run_dir: Path, plan: Plan) -> None:
    path = run_dir / "plan.toml"
    checkpoints = store.committed(run_dir)
    if path.exists() and checkpoints and Plan.load(path) != plan:
        path.replace(run_dir / f"plan-{checkpoints[-1].step:08d}.toml")
    plan.save(path)


def settle_plan(run_dir: Path, run: RunConfig, devices: Devices, say: Callable[[str], None]) -> Plan:
    """Return the plan to train `run` with in `run_dir`, for these devices, which have the memory for it.

    A run that goes on keeps what changes its numbers; `say` is told what a new run would choose instead, and why a new
    run agrees as it does if that was left open.
    Raises: UserError.
    """
    before = _plan_before(store.committed(run_dir)) or plan_there(run.checkpoint.remote, run_dir)
    if before is None:
        plan, words = choose_with_reasons(run, devices)
    else:
        plan = plan_to_go_on(run, devices, before)
        words = other_choice(run, devices, plan)
    check_compiler(plan, devices.kind)
    check_memory(run, plan, devices)
    if words:
        say(words)
    return plan


def check_before_preparing(run_dir: Path, run: RunConfig, find: Callable[[], Devices]) -> None:
    """Refuse before data are prepared, which may take hours, what would be refused once they are. Raises: UserError.

    find: returns the devices of the run.
    """
    prepare = run.data.prepare
    if prepare.input and not (prepare.out / MANIFEST).exists():
        settle_plan(run_dir, with_known_sizes(run), find(), lambda words: None)


def _plan_before(checkpoints: list[store.Checkpoint]) -> Plan | None:
    """Return the plan of the newest checkpoint that tells it; imported ones were trained elsewhere, with none."""
    for checkpoint in reversed(checkpoints):
        with suppress(DamagedCheckpoint, UserError):
            return Plan.parse(checkpoint.manifest.plan) if checkpoint.manifest.plan else None
    return None


def _data_identity(checkpoints: list[store.Checkpoint]) -> str | None:
    """Return that of the newest checkpoint whose manifest can be read; the workers report those that cannot."""
    for checkpoint in reversed(checkpoints):
        with suppress(DamagedCheckpoint):
            return checkpoint.manifest.data_identity
    return None


def _differences(before: RunConfig, now: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Return dotted key -> both values, for keys that must not change silently."""
    old, new = (lasting_values(run) | {WEIGHTS_KEY: _weights(run)} for run in (before, now))
    return {key: (old.get(key), new.get(key)) for key in old | new if old.get(key) != new.get(key)}


def _weights(run: RunConfig) -> str:
    return spelled(run.model.weights) if run.model.weights else "none"


MOUNTS = Path("/proc/self/mountinfo")
OBJECT_STORES = ("s3fs", "goofys", "gcsfuse", "rclone", "blobfuse", "blobfuse2", "mountpoint-s3", "mount-s3", "ossfs")
"""Mounted object stores: they rename a folder by copying its files one by one."""
LOCAL_LOCKS = ("nolock", "local_lock=flock", "local_lock=all", "localflock", "noflock")
"""Options of NFS and Lustre mounts whose locks other machines do not see."""
DISK_REMEDY = (
    "Choose another disk with --run-dir: a local one, or for several machines NFS 4, Lustre mounted with flock, CephFS "
    "or alike. Copies of checkpoints may go to an object store: checkpoint.remote."
)
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


def check_storage(run_dir: Path, nodes: int) -> None:
    """Try what a run of `nodes` machines needs of the storage of `run_dir`, which exists. It takes some milliseconds.

    Raises: UserError that names what is missing; StorageError if the disk is full.
    """
    kind, options = mount_of(run_dir)
    if kind.removeprefix("fuse.") in OBJECT_STORES:
        raise UserError(
            f"{run_dir} is on a mounted object store ({kind}), where a folder is not renamed at once. {DISK_REMEDY}"
        )
    if nodes > 1 and (local := [option for option in options if option in LOCAL_LOCKS]):
        raise UserError(
            f"{run_dir} is mounted with {local[0]} ({kind}): machines do not see each other's locks there. Mount it "
            f"without, on all machines. {DISK_REMEDY}"
        )
    try:
        with tempfile.TemporaryDirectory(prefix=".storage-", dir=run_dir, ignore_cleanup_errors=True) as probe:
            _check_locks(run_dir, Path(probe))
            _check_renames(run_dir, Path(probe))
    except OSError as problem:
        if problem.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageError(
                f"{run_dir}: its disk is full ({problem.strerror}). Free some space, or choose another disk."
            ) from None
        raise UserError(f"{run_dir}: cannot be written ({problem.strerror}). {DISK_REMEDY}") from None


def mount_of(path: Path, mounts: Path = MOUNTS) -> tuple[str, Sequence[str]]:
    """Return the kind of the file system that `path` is on, and its options; both empty if the system does not say.

    The format is that of proc_pid_mountinfo(5).
    """
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return "", ()
    found: tuple[int, str, Sequence[str]] = (-1, "", ())
    for line in lines:
        before, _, after = line.partition(" - ")
        point = Path(re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), before.split()[4]))  # \040: a blank
        if path.absolute().is_relative_to(point) and len(point.parts) >= found[0]:
            kind, _, options = (*after.split(), "", "")[:3]
            found = len(point.parts), kind, [*before.split()[5].split(","), *options.split(",")]
    return found[1:]


def _check_locks(run_dir: Path, probe: Path) -> None:
    path = probe / "lock"
    with path.open("w") as one, path.open("w") as other:
        try:
            fcntl.flock(one, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as problem:
            if problem.errno not in NO_LOCKS:
                raise
            raise UserError(f"{run_dir}: its storage has no locks (flock: {problem.strerror}). {DISK_REMEDY}") from None
        try:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        raise UserError(f"{run_dir}: its storage lets two processes have one lock (flock). {DISK_REMEDY}")


def _check_renames(run_dir: Path, probe: Path) -> None:
    partial, whole, other = probe / "partial", probe / "whole", probe / "other"
    for folder in (partial, other):
        folder.mkdir()
        (folder / "file").write_bytes(b"x")
    try:
        partial.rename(whole)
    except OSError as problem:
        raise UserError(f"{run_dir}: its storage cannot rename a folder ({problem.strerror}). {DISK_REMEDY}") from None
    if partial.exists() or not (whole / "file").is_file():
        raise UserError(f"{run_dir}: its storage does not rename a folder as a whole. {DISK_REMEDY}")
    try:
        other.rename(whole)
    except OSError:
        return
    raise UserError(f"{run_dir}: its storage renames a folder over another that is not empty. {DISK_REMEDY}")


def load_report(run_dir: Path, run: RunConfig) -> Report:
    """Return the report of a run that is over. Raises: UserError, or of a worker RunFailed, if no step is told of."""
    if (run_dir / "report.json").exists():
        return Report.load(run_dir)
    if is_asynchronous(run.plan):
        raise RunFailed(f"{run_dir}: the run was over before this worker had made an update.")
    raise UserError(f"{run_dir}: no step is in metrics.jsonl, so there is no report. {finished_in_words(run_dir, run)}")


def finished_in_words(run_dir: Path, run: RunConfig) -> str:
    """Return the message for a run that has made all of its steps, with what makes it longer."""
    longer = "--train.steps" if run.sites else "--train.steps (or --train.minutes)"
    return f"{run_dir} is finished. More {longer} make it longer; --name or --run-dir give another run."
