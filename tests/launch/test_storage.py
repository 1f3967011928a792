"""Storage that cannot hold a run is named before anything is trained.

No file system without flock can be mounted here: what such a one does to the system calls is done by a library that is
loaded before the C library.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from argosy.errors import UserError
from argosy.launch import run_folder, storage
from argosy.launch.storage import check_storage, mount_of

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


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("no locks", "its storage has no locks (flock: No locks available). Choose another disk with --run-dir"),
        ("shared locks", "its storage lets two processes have one lock"),
        ("no renames", "its storage cannot rename a folder (Invalid cross-device link)"),
        ("copies", "its storage does not rename a folder as a whole"),
    ],
)
def test_storage_that_lacks_something_is_refused_by_the_command(
    tmp_path: Path, shim: Path, how: str, said: str
) -> None:
    run = tmp_path / "run.toml"
    run.write_text('[data]\nsources = {"nowhere" = 1.0}\n')  # it would be missed next
    done = subprocess.run(
        [sys.executable, "-m", "argosy", "train", str(run), "--run-dir", str(tmp_path / "run")],
        env={**os.environ, "LD_PRELOAD": str(shim), "SPOIL": how},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert not (tmp_path / "run").exists()


def test_storage_that_does_what_it_must_is_left_as_it_was(tmp_path: Path) -> None:
    check_storage(tmp_path, nodes=2)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> str:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(storage.tempfile, "mkdtemp", refuse)
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
    monkeypatch.setattr(storage, "mount_of", lambda run_dir: mount_of(run_dir, mounts))
    with pytest.raises(UserError, match=said):
        check_storage(Path(path), nodes)
