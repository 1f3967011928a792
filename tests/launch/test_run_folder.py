"""The run's folder: who may write in it, and whether what is asked for is what it holds."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from argosy.checkpoint import fence, store
from argosy.checkpoint.manifest import CheckpointManifest
from argosy.checkpoint.remote import Remote
from argosy.config.dump import save_run
from argosy.config.load import load
from argosy.config.schema import RunConfig
from argosy.config.sync import SiteConfig
from argosy.errors import RunFailed, StorageError, UserError
from argosy.launch import run_folder
from argosy.launch.run_folder import check_is_run_folder, check_storage, mount_of
from argosy.plan.plan import Plan
from argosy.plan.search.auto import Devices
from tiny import run_config

CORPUS = "0123456789abcdef"
HOLD = """
import sys, time
from pathlib import Path
from argosy.launch.run_folder import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def run(**sections: dict[str, object]) -> RunConfig:
    return run_config(Path("/corpus"), **sections)


def hold(run_dir: Path, held: RunConfig, step: int = 4, plan: str = "") -> RunConfig:
    """Make `run_dir` that of the run `held`, with a checkpoint."""
    folder = fence.partial_folder(run_dir, step, generation=0)
    folder.mkdir(parents=True)
    facts = {"tokens": 0, "saved_at_s": 0.0, "plan": plan, "has_optimizer": True, "files": {}}
    store.commit(folder, CheckpointManifest(step=step, data_identity=CORPUS, **facts))
    save_run(held, run_dir / "run.toml")
    return held


def enter(run_dir: Path, asked: RunConfig, identity: str = CORPUS, accept_changes: bool = False) -> RunConfig:
    return run_folder.enter(run_dir, asked, identity, accept_changes)


def test_a_folder_has_one_holder_at_a_time(tmp_path):
    with run_folder.locked(tmp_path / "run"):
        with (
            pytest.raises(UserError, match=r"in use by process \d+\. .* --run-dir"),
            run_folder.locked(tmp_path / "run"),
        ):
            pass
        with run_folder.locked(tmp_path / "another"):
            pass
    with run_folder.locked(tmp_path / "run"):
        pass


@pytest.mark.parametrize(("node", "other"), [("", "a"), ("a", "")])
def test_a_folder_has_a_run_of_one_machine_or_one_of_several(tmp_path, node, other):
    with (
        run_folder.locked(tmp_path, node, 2),
        pytest.raises(UserError, match=r"in use by process \d+"),
        run_folder.locked(tmp_path, other, 2),
    ):
        pass
    with run_folder.locked(tmp_path, "a", 2), run_folder.locked(tmp_path, "b", 2):
        pass


def test_the_holder_is_named_and_its_death_frees_the_folder(tmp_path):
    with subprocess.Popen([sys.executable, "-c", HOLD, tmp_path], stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(UserError, match=f"in use by process {holder.pid}"), run_folder.locked(tmp_path):
            pass
        holder.kill()
    with run_folder.locked(tmp_path):
        pass


def test_an_empty_folder_takes_any_run(tmp_path):
    save_run(run(optimizer={"lr": 1.0}), tmp_path / "run.toml")  # it was asked for once, and saved nothing
    assert enter(tmp_path, run()) == run()


def test_the_same_run_goes_on(tmp_path):
    assert enter(tmp_path, hold(tmp_path, run())) == run()


@pytest.mark.parametrize(
    "harmless",
    [
        {"train": {"steps": 1000}},
        {"launch": {"processes": 4}},
        {"checkpoint": {"every_steps": 7}},
        {"evaluate": {"tokens": 5}},
    ],
    ids=lambda sections: next(iter(sections)),
)
def test_what_does_not_change_the_numbers_may_be_otherwise(tmp_path, harmless):
    hold(tmp_path, run())
    assert enter(tmp_path, run(**harmless)) == run(**harmless)


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"optimizer": {"lr": 0.5}}, "  optimizer.lr: 0.01 in the folder, 0.5 now"),
        ({"train": {"global_batch": 4}}, "  train.global_batch: 8 in the folder, 4 now"),
        ({"data": {"seq_len": 16}}, "  data.seq_len: 32 in the folder, 16 now"),
        (
            {"data": {"sources": {"/corpus": 1.0, "/b": 2.0}}},
            "  data.sources: {'/corpus': 1.0} in the folder, {'/corpus': 1.0, '/b': 2.0} now",
        ),
        ({"model": {"weights": "hf://a/b"}}, "  model.weights: none in the folder, hf://a/b now"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_what_changes_the_numbers_is_said_and_taken_only_if_accepted(tmp_path, changed, line):
    hold(tmp_path, run())
    with pytest.raises(UserError, match="holds another run, at step 4") as refusal:
        enter(tmp_path, run(**changed))
    assert line in str(refusal.value).splitlines() and "--accept-changes" in str(refusal.value)
    assert ("give [[data.stages]] with from_step = 4:" in str(refusal.value)) == line.startswith("  data.sources")
    assert enter(tmp_path, run(**changed), accept_changes=True) == run(**changed)


def test_a_larger_batch_is_told_how_it_leaves_no_samples_out(tmp_path):
    """With another batch alone, step 4 begins at sample 64, where the run has come to sample 32."""
    hold(tmp_path, run())
    ramp, hint = [{"until_step": 4, "global_batch": 8}], r"train.batch_ramp\]\] with until_step = 4 and the old batch"
    with pytest.raises(UserError, match=hint):
        enter(tmp_path, run(train={"global_batch": 16}))
    larger = run(train={"global_batch": 16, "batch_ramp": ramp})
    with pytest.raises(UserError, match="holds another run, at step 4") as refusal:
        enter(tmp_path, larger)
    assert "To leave none out" not in str(refusal.value)
    assert enter(tmp_path, larger, accept_changes=True).train.batches.before(4) == run().train.batches.before(4)


def test_other_data_under_the_same_name_is_noticed(tmp_path):
    hold(tmp_path, run())
    with pytest.raises(UserError, match=f"prepared data {CORPUS} in the folder, prepared data fedc"):
        enter(tmp_path, run(), identity="fedc")
    assert enter(tmp_path, run(), identity="fedc", accept_changes=True) == run()


def test_another_model_is_refused_even_if_changes_are_accepted(tmp_path):
    hold(tmp_path, run())
    with pytest.raises(UserError, match=r"model\.layers: 2 in the folder, 3 now") as refusal:
        enter(tmp_path, run(model={"layers": 3}), accept_changes=True)
    assert "--accept-changes" not in str(refusal.value)


def test_the_length_that_was_found_for_a_budget_of_minutes_is_kept_for_the_same_budget(tmp_path):
    hold(tmp_path, run(train={"steps": 123, "minutes": 5}))
    same, longer = run(train={"steps": 0, "minutes": 5}), run(train={"steps": 0, "minutes": 50})
    assert enter(tmp_path, same).train.steps == 123
    assert enter(tmp_path, longer).train.steps == 0


def test_a_run_cannot_be_made_shorter_than_it_is(tmp_path):
    hold(tmp_path, run(train={"steps": 20}), step=12)
    with pytest.raises(UserError, match=r"train\.steps = 5: .* at step 12\. Give --train\.steps 12 .*--run-dir"):
        enter(tmp_path, run(train={"steps": 5}))
    assert enter(tmp_path, run(train={"steps": 12})).train.steps == 12


def test_a_checkpoint_whose_manifest_is_damaged_does_not_keep_the_run_from_the_one_before_it(tmp_path):
    hold(tmp_path, run())
    (hold_newer := store.step_folder(tmp_path, 6)).mkdir()
    (hold_newer / store.MANIFEST).write_text("{")
    assert enter(tmp_path, run()) == run()
    with pytest.raises(UserError, match=CORPUS):
        enter(tmp_path, run(), identity="fedc")


@pytest.mark.parametrize("lost", [False, True], ids=["here", "in the remote place alone"])
@pytest.mark.parametrize("begun", ["", "dp_replicate=2,microbatch=4,precision=bf16"], ids=["new", "begun"])
def test_the_number_format_of_the_first_start_is_that_of_every_other(tmp_path, begun, lost):
    asked, said = run(checkpoint={"remote": str(tmp_path / "there")}).model_copy(update={"plan": "auto"}), []
    hold(tmp_path, asked, plan=begun)
    if lost:
        (saved,) = store.committed(tmp_path)
        Remote(asked.checkpoint.remote, tmp_path).put(saved, lambda: None)
        store.remove(saved.folder)
    slow, fast = (Devices(2, "cpu", fast_bf16=fast) for fast in (False, True))
    plans = [run_folder.settle_plan(tmp_path, asked, devices, said.append) for devices in (slow, fast)]
    assert [plan.precision for plan in plans] == (["bf16", "bf16"] if begun else ["fp32", "bf16"])
    assert len(said) == bool(begun)
    if begun:
        assert plans == [Plan.parse(begun)] * 2 and "a new run would take fp32 here" in said[0]


def test_a_plan_that_cannot_run_is_refused_before_data_are_prepared(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    prepare = {"input": (__file__,), "out": tmp_path / "data"}
    asked = run(data={"sources": {}, "prepare": prepare}).model_copy(update={"plan": "compile=true"})

    def check() -> None:
        run_folder.check_before_preparing(tmp_path / "run", asked, lambda: Devices(1, "cpu", fast_bf16=False))

    with pytest.raises(UserError, match=r"compile=true, and this machine has no compiler: g\+\+"):
        check()
    assert not list(tmp_path.iterdir())
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "manifest.json").touch()
    check()  # there is nothing to prepare, and the plan is settled a moment later


def test_the_folder_then_needs_nothing_else_to_be_used(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data/tokenizer.json").write_text("a tokenizer")
    asked = run(data={"prepare": {"out": tmp_path}})
    run_folder.write(tmp_path, asked, Plan(microbatch=2), [tmp_path / "data"])
    assert (tmp_path / "tokenizer.json").read_text() == "a tokenizer"
    assert load(tmp_path / "run.toml") == asked
    assert Plan.load(tmp_path / "plan.toml") == Plan(microbatch=2)
    here = {"nodes": 2, "lease": "folder", "node": "a", "address": "10.0.0.1"}  # others read it too
    run_folder.write(tmp_path, asked.with_keys(launch=here), Plan(), [tmp_path / "data"])
    assert load(tmp_path / "run.toml") == asked.with_keys(launch={"nodes": 2, "lease": "folder"})


def test_a_run_on_conversations_keeps_the_template_of_its_data(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    (data / "tokenizer.json").write_text("{}")
    (data / "chat_template.jinja").write_text("{{ messages }}")
    for objective in ("sft", "pretrain"):
        run_dir = tmp_path / objective
        run_dir.mkdir()
        run_folder.write(run_dir, run(train={"objective": objective}), Plan(), [data])
        assert (run_dir / "chat_template.jinja").exists() == (objective == "sft")
    text = tmp_path / "text"  # that is mixed in, and named first
    text.mkdir()
    (text / "tokenizer.json").write_text("{}")
    run_folder.write(text, run(train={"objective": "sft"}), Plan(), [text, data])
    assert (text / "chat_template.jinja").read_text() == "{{ messages }}"


def test_a_finished_run_whose_steps_were_made_elsewhere_is_said_to_have_no_report(tmp_path):
    with pytest.raises(UserError, match=r"no step is in metrics\.jsonl.* is finished\. More --train\.steps"):
        run_folder.load_report(tmp_path, run())


def test_a_full_disk_is_a_message(tmp_path):
    (tmp_path / "tokenizer.json").write_text("a tokenizer")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4, hard))
    try:
        with pytest.raises(StorageError, match=r"cannot be written \(.*Free some space"):
            run_folder.write(tmp_path, run(), Plan(), [tmp_path])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_plan_that_is_replaced_is_kept_under_the_step_it_was_in_force_until(tmp_path):
    (tmp_path / "tokenizer.json").write_text("")
    for microbatch, step in ((1, 0), (1, 3), (2, 5)):
        if step:
            hold(tmp_path, run(), step)
        run_folder.write(tmp_path, run(), Plan(microbatch=microbatch), [tmp_path])
    assert Plan.load(tmp_path / "plan.toml") == Plan(microbatch=2)
    assert {path.name for path in tmp_path.glob("plan-*")} == {"plan-00000005.toml"}
    assert Plan.load(tmp_path / "plan-00000005.toml") == Plan(microbatch=1)


def test_a_folder_is_not_taken_whose_state_lies_elsewhere(tmp_path: Path) -> None:
    alone = run()
    sites = alone.model_copy(update={"sites": (SiteConfig(name="A"), SiteConfig(name="B"))})
    workers = sites.model_copy(update={"plan": "sync=async"})
    hold(tmp_path / "alone", alone)
    hold(tmp_path / "sites" / "sites" / "A", sites)
    run_folder.check_parts(tmp_path / "alone", alone)
    run_folder.check_parts(tmp_path / "alone", workers)
    run_folder.check_parts(tmp_path / "sites", sites)
    run_folder.check_parts(tmp_path / "sites" / "sites" / "plain", alone)
    of_a = sites.model_copy(update={"site": "A"})
    for there in (tmp_path / "sites", tmp_path / "sites" / "sites" / "A", tmp_path / "new"):
        run_folder.check_parts(there, of_a)
    for wanted in (sites, of_a):
        with pytest.raises(UserError, match=r"alone holds a run.* at step 4.*model\.weights = \".*alone\""):
            run_folder.check_parts(tmp_path / "alone", wanted)
    with pytest.raises(UserError, match=r"checkpoints in .*sites/A; this run has no \[\[sites\]\].*--run-dir"):
        run_folder.check_parts(tmp_path / "sites", alone)
    with pytest.raises(UserError, match="this run is asynchronous"):
        run_folder.check_parts(tmp_path / "sites", workers)


SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
static int is(const char *what) { const char *how = getenv("SPOIL"); return how && !strcmp(how, what); }
int flock(int fd, int operation) {
    if (is("no locks")) { errno = ENOLCK; return -1; }
    if (is("shared locks")) return 0;
    return ((int (*)(int, int))dlsym(RTLD_NEXT, "flock"))(fd, operation);
}
int rename(const char *from, const char *to) {
    struct stat about;
    if (!stat(from, &about) && S_ISDIR(about.st_mode)) {
        if (is("no renames")) { errno = EXDEV; return -1; }
        if (is("copies")) return mkdir(to, 0700);
    }
    return ((int (*)(const char *, const char *))dlsym(RTLD_NEXT, "rename"))(from, to);
}
"""
MOUNTINFO = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 22 0:40 / /mnt/nfs rw shared:2 - nfs server:/x rw,vers=3,nolock,local_lock=all
31 22 0:41 / /mnt/with\\040blank rw - fuse.s3fs s3fs rw,user_id=0
32 22 0:42 / /mnt/nfs4 rw - nfs4 server:/y rw,vers=4.2,local_lock=none
"""


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not (compiler := shutil.which("gcc") or shutil.which("cc")):
        pytest.skip("there is no C compiler here")
    folder = tmp_path_factory.mktemp("shim")
    (folder / "shim.c").write_text(SHIM)
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-o", folder / "shim.so", folder / "shim.c", "-ldl"], check=True, cwd=folder
    )
    return folder / "shim.so"


def test_storage_that_lacks_something_is_refused_by_the_command(tmp_path: Path, shim: Path) -> None:
    said = {
        "no locks": "its storage has no locks (flock: No locks available). Choose another disk with --run-dir",
        "shared locks": "its storage lets two processes have one lock",
        "no renames": "its storage cannot rename a folder (Invalid cross-device link)",
        "copies": "its storage does not rename a folder as a whole",
    }
    run = tmp_path / "run.toml"
    run.write_text('[data]\nsources = {"nowhere" = 1.0}\n')  # it would be missed next
    # In one process, without the one that imports torch ahead of its need.
    command = """
import os, sys
from argosy.cli import main, train
train.STARTS_NOTHING = sys.argv
for os.environ["SPOIL"] in sys.argv[4:]:
    assert main(["train", *sys.argv[1:4]]) == 2
"""
    done = subprocess.run(
        [sys.executable, "-c", command, str(run), "--run-dir", str(tmp_path / "run"), *said],
        env={**os.environ, "LD_PRELOAD": str(shim)},
        capture_output=True,
        text=True,
        check=False,
    )
    refusals = done.stderr.splitlines()
    assert not done.returncode and len(refusals) == len(said), done.stderr
    assert all(text in refusal for text, refusal in zip(said.values(), refusals, strict=True)), done.stderr
    assert not (tmp_path / "run").exists()


def test_storage_that_does_what_it_must_is_left_as_it_was(tmp_path: Path) -> None:
    check_storage(tmp_path, nodes=2)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_told_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(StorageError, match=r"its disk is full \(No space left on device\)\. Free some space"):
        check_storage(tmp_path, nodes=1)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> str:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(run_folder.tempfile, "mkdtemp", refuse)
    with (
        pytest.raises(UserError, match=r"run: cannot be written \(Read-only file system\)"),
        run_folder.locked(tmp_path / "run"),
    ):
        pass


def test_the_mount_of_a_path_is_the_innermost(tmp_path: Path) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTINFO)
    assert mount_of(Path("/home/x"), mounts)[0] == "ext4"
    assert mount_of(Path("/mnt/with blank/runs"), mounts)[0] == "fuse.s3fs"
    assert mount_of(Path("/mnt/nfs4"), mounts)[0] == "nfs4"
    assert "nolock" in mount_of(Path("/mnt/nfs/runs"), mounts)[1]
    assert mount_of(Path("/"), tmp_path / "none") == ("", ())
    assert mount_of(tmp_path)[0], "the real one"


@pytest.mark.parametrize(
    ("path", "nodes", "said"),
    [
        ("/mnt/with blank", 1, "mounted object store"),
        ("/mnt/nfs", 2, r"mounted with nolock \(nfs\): machines do not see each other's locks"),
    ],
)
def test_mounts_that_are_known_to_be_wrong_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, nodes: int, said: str
) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTINFO)
    monkeypatch.setattr(run_folder, "mount_of", lambda run_dir: mount_of(run_dir, mounts))
    with pytest.raises(UserError, match=said):
        check_storage(Path(path), nodes)


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.mark.parametrize("names", [["notes.txt"], ["run.toml"], [".git", "run.toml", ".lock"], ["tokenizer.json", "a"]])
def test_a_folder_of_somebody_else_is_refused_and_left_as_it_was(tmp_path, names):
    for name in names:
        (tmp_path / name).write_text("mine")
    with (
        pytest.raises(UserError, match=r"is not the folder of a run: it holds .* --run-dir"),
        run_folder.locked(tmp_path),
    ):
        pass
    assert files(tmp_path) == set(names)


@pytest.mark.parametrize(
    "names",
    [
        [],
        [".lock", ".settling", ".secret"],
        [".lock", ".secret", "tls", "tls-1.partial"],
        [".lock-a-0", ".lock-b-0", "tokenizer.json.partial"],
        [".lock", "tokenizer.json", "run.toml", "logs"],
        ["run.toml", "plan.toml", "what I noticed.txt"],
    ],
)
def test_a_run_s_own_folder_is_entered_be_it_only_begun(tmp_path, names):
    for name in names:
        (tmp_path / name).write_text("")
    check_is_run_folder(tmp_path)


def test_a_path_that_is_a_file_or_leads_through_one_is_refused(tmp_path):
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with (
            pytest.raises(UserError, match=r"file is a file, and a run needs a folder.*--run-dir"),
            run_folder.locked(path),
        ):
            pass


def test_a_folder_that_cannot_be_made_is_refused(tmp_path, monkeypatch):
    def refuse(path, mode=0o777, dir_fd=None):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "mkdir", refuse)  # root may write anywhere
    with (
        pytest.raises(UserError, match=rf"Permission denied.*write in {tmp_path}, or"),
        run_folder.locked(tmp_path / "a"),
    ):
        pass


def test_a_refused_run_leaves_nothing_behind(tmp_path):
    with pytest.raises(UserError, match="wrong"), run_folder.locked(tmp_path / "runs" / "mine"):
        raise UserError("wrong")
    assert not files(tmp_path)


def test_a_folder_that_another_process_was_faster_to_take_is_left_to_it(tmp_path, monkeypatch):
    run_dir = tmp_path / "mine"
    with run_folder.locked(run_dir):
        monkeypatch.setattr(Path, "iterdir", lambda path: iter(()))  # as if it had been seen before the other made it
        with pytest.raises(UserError, match="in use by process"), run_folder.locked(run_dir):
            pass
        assert (run_dir / ".lock").exists()


@pytest.mark.parametrize("kept", ["it was there", "it failed later", "steps were done", "others are in it"])
def test_what_is_worth_something_stays(tmp_path, kept):
    run_dir = tmp_path / "mine"
    if kept == "it was there":
        run_dir.mkdir()
        (run_dir / ".lock").touch()
    error = RunFailed if kept == "it failed later" else UserError
    with pytest.raises(error), run_folder.locked(run_dir, nodes=2 if kept == "others are in it" else 1):
        if kept == "steps were done":
            (run_dir / "metrics.jsonl").write_text("{}\n")
        raise error("wrong")
    assert (run_dir / ".lock").exists()


def test_a_finished_run_names_only_lengths_that_it_takes():
    sites = tuple(SiteConfig(name=name) for name in ("north", "south"))
    of_sites = run().model_copy(update={"sites": sites})
    said = [run_folder.finished_in_words(Path("runs/mine"), each) for each in (run(), of_sites)]
    assert ["train.minutes" in words for words in said] == [True, False]  # sites end with the same step
    assert all("--train.steps" in words and words.startswith("runs/mine is finished") for words in said)
