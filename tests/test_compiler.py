"""torch's compiler is loaded where something is compiled, and nowhere else."""

from __future__ import annotations

import _ctypes
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from argosy.compiler import drop_damaged_libraries

HEAVY = ("torch._dynamo", "torch._inductor", "torch.distributed.tensor", "sympy")
CODE = """
import _ctypes, json, os, platform, shutil, sys
from pathlib import Path
import argosy.supervise.worker
from argosy import compiler
from argosy.models import attention
from argosy.parallel import halo, recompute
from argosy.parallel.world import World
from tiny import EAGER, run_config, train_in

corpus, run_dir, *heavy = sys.argv[1:]
banded = {"layers": ["sliding", "full"], "window": 4}  # by an operator of our own
train_in(World(), run_config(Path(corpus), model={"attention": banded}, train={"steps": 2}), EAGER, Path(run_dir))
loaded = [name for name in heavy if name in sys.modules]

from torch._inductor import codecache

def precompile(header, command_line):
    precompiled.append(header)
    path = Path(run_dir) / f"{header}.h"
    Path(f"{path}.gch").touch()
    return str(path)

precompiled = []
codecache._precompile_header = precompile
compiler.load()
headers = []
for header in ("a", "a", "b", "a"):
    codecache._precompile_header.cache_clear()  # as in a new process
    headers.append(codecache._precompile_header(header, "g++"))
    if header == "b":
        (Path(run_dir) / "a.h.gch").unlink()  # /tmp was cleared
from torch._inductor.cpu_vec_isa import VecAVX2
isa, library, broken = VecAVX2(), Path(run_dir) / "kept.so", Path(run_dir) / "broken.so"
shutil.copy(_ctypes.__file__, library)
broken.touch()
loads = [isa._probe_load(str(library)), isa._probe_load(str(broken)), isa._probe_load(str(broken))]
library.unlink()

from torch._inductor import cpu_vec_isa

class VectorSet:
    def __init__(self, name, works):
        self.name, self.works = name, works

    def __str__(self):
        return ""  # no flag that this CPU would have to have

    def __bool__(self):
        tried.append(self.name)
        return self.works

tried = []
sets = [VectorSet("broken", False), VectorSet("wide", True), VectorSet("narrow", True)]
cpu_vec_isa.supported_vec_isa_list = sets
is_x86 = platform.machine() == "x86_64"
found = [[each.name for each in cpu_vec_isa.valid_vec_isa_list()] for _ in range(2)] if is_x86 else None
widest = {"found": found, "tried": list(tried), "left": cpu_vec_isa.supported_vec_isa_list == sets}
os.environ["ATEN_CPU_CAPABILITY"] = "avx2"
widest["named"] = len(cpu_vec_isa.valid_vec_isa_list()) if is_x86 else None
functions = attention._attention_by_document, halo.halo_attention, recompute._recomputed_around_compiled
print(json.dumps({
    "loaded": loaded,
    "loads": [*loads, isa._probe_load(str(library))],
    "widest": widest,
    "headers": [precompiled, [Path(path).name for path in headers]],
    "cache": os.environ[compiler.CACHE_DIR],
    "disabled": [getattr(function, "_torchdynamo_disable", False) for function in functions],
}))
"""


@pytest.fixture(scope="module")
def found(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a worker's process is like that has trained without compiling, and then loads the compiler."""
    folder = tmp_path_factory.mktemp("loads")
    environment = {key: value for key, value in os.environ.items() if key != "TORCHINDUCTOR_CACHE_DIR"}
    environment |= {"XDG_CACHE_HOME": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-c", CODE, str(corpus), str(folder), *HEAVY]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {**result, "folder": folder}


def test_a_run_that_compiles_and_splits_nothing_starts_without_the_compiler(found):
    assert found["loaded"] == []


def test_what_is_compiled_is_kept_in_the_users_cache_for_all_runs(found):
    assert found["cache"] == str(found["folder"] / "cache" / "argosy" / "inductor")


@pytest.mark.parametrize(("kept_bytes", "is_left"), [(None, True), (2000, False), (0, False), (10, False)], ids=str)
def test_libraries_that_a_crash_has_cut_off_are_deleted_once_nobody_writes_them(tmp_path, kept_bytes, is_left):
    library = tmp_path / "ab" / "kernel.so"
    library.parent.mkdir()
    shutil.copy(_ctypes.__file__, library)
    if kept_bytes is not None:
        os.truncate(library, kept_bytes)
    drop_damaged_libraries(tmp_path)
    assert library.exists()  # it may be under way
    drop_damaged_libraries(tmp_path, old_s=-1)
    assert library.exists() == is_left


def test_a_library_that_loads_is_tried_once_and_a_broken_one_each_time(found):
    assert found["loads"] == [True, False, False, True]


def test_a_header_is_precompiled_once_for_all_processes_while_it_is_there(found):
    assert found["headers"] == [["a", "b", "a"], ["a.h", "a.h", "b.h", "a.h"]]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="torch has several sets for x86-64 alone")
def test_vector_sets_are_tried_from_the_widest_on_until_one_works(found):
    assert found["widest"] == {"found": [["wide"], ["wide"]], "tried": ["broken", "wide"], "left": True, "named": 2}


def test_what_is_marked_stays_outside_compiled_graphs(found):
    assert found["disabled"] == [True, True, True]
