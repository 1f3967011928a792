"""torch's compiler, loaded only where something is compiled: importing it takes half a second.

`torch.compiler.disable` imports it at once, so functions that stay out of compiled graphs are marked here, and disabled
when the compiler is loaded.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import os
import struct
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "argosy" / "inductor"
"""Folder of compiled graphs and kernels, for all runs and processes of a user."""
CACHE_DIR = "TORCHINDUCTOR_CACHE_DIR"
"""torch's environment variable for it."""
PROBE_METHOD = "_probe_load"
"""torch's method of a vector instruction set that tries a library; no public name."""
PRECOMPILE = "_precompile_header"
"""torch's function that returns a header, with the compiled form beside it; no public name."""

VALID_SETS, SUPPORTED_SETS = "valid_vec_isa_list", "supported_vec_isa_list"
"""torch's function that tries the vector instruction sets, and its list of them; no public names."""

LIBRARY_OLD_S = 60.0
"""Seconds after which nobody writes a library of the cache any more."""

F = TypeVar("F", bound=Callable[..., object])
_outside_graphs: list[Callable[..., object]] = []


def outside_graphs(function: F) -> F:
    """Mark a function of a module, or a method of its classes, which compiled code calls and does not trace."""
    if is_loaded():
        return torch.compiler.disable(function)
    _outside_graphs.append(function)
    return function


def operator(name: str) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that makes a function torch's operator argosy::`name`, which compiled code calls as it is.

    `torch.library.custom_op` would load the compiler at the operator's first call, in a run that compiles nothing too:
    40 MB of Python objects, 80 MB of resident memory, and seconds.
    """

    def decorate(kernel: Callable[..., Any]) -> Any:
        schema = torch.library.infer_schema(kernel, mutates_args=())
        torch.library.define(f"argosy::{name}", schema, tags=torch.Tag.pt2_compliant_tag)
        torch.library.impl(f"argosy::{name}", "default", kernel)
        return getattr(torch.ops.argosy, name).default

    return decorate


def is_loaded() -> bool:
    """Return True once `load` was called."""
    return "torch._dynamo" in sys.modules and not _outside_graphs


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function compiled for all shapes, and for all integers among its arguments, by the loaded compiler."""
    return torch.compile(function, dynamic=True)


def varies(*tensors: torch.Tensor) -> None:
    """Tell the compiler, if it is loaded, that these tensors' lengths differ from batch to batch.

    Otherwise it compiles for the first length, and for any at the second.
    """
    if is_loaded():
        for tensor in tensors:
            torch._dynamo.maybe_mark_dynamic(tensor, 0)


def load_tracer() -> None:
    """Import the half of the compiler that traces; `load` then takes half as long."""
    os.environ.setdefault(CACHE_DIR, str(CACHE))  # importing the compiler sets it to a folder of /tmp
    importlib.import_module("torch._dynamo")


def load() -> None:
    """Load the compiler, with what compiling imports; before anything is compiled.

    What it makes is kept on disk, so that only the first run of a model waits for it. TORCHINDUCTOR_CACHE_DIR, if the
    user has set it, says where.
    """
    is_first = not is_loaded()
    load_tracer()
    for name in ("torch._inductor.compile_fx", "torch._dynamo.repro.after_dynamo"):
        importlib.import_module(name)
    # A block tells its dropout which tokens it computes; a graph that recomputes it has them still.
    torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    # All blocks are one function to the compiler, which runs it uncompiled beyond so many kinds of them: with experts,
    # a window or another width, each with and without gradients, of its input too, and documents that begin in a row.
    torch._dynamo.config.recompile_limit = 128
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir  # no public name

    if os.environ[CACHE_DIR] == default_cache_dir():  # another package has imported the compiler
        os.environ[CACHE_DIR] = str(CACHE)
    if is_first:
        drop_damaged_libraries(Path(os.environ[CACHE_DIR]))
    _keep_probes()
    _keep_headers()
    _try_few_vector_sets()
    _look_up_no_names()
    while _outside_graphs:
        _disable(_outside_graphs.pop())


def drop_damaged_libraries(cache: Path, old_s: float = LIBRARY_OLD_S) -> None:
    """Delete libraries that a machine's crash has left half-written: torch would try to load them for ever.

    In ELF files the table of sections is last. Files younger than `old_s` may still be written by another process.
    """
    for library in cache.glob("*/*.so"):
        try:
            about = library.stat()
            with library.open("rb") as file:
                head = file.read(64)
            is_damaged = len(head) < 64 or not any(head)
            if not is_damaged and head.startswith(b"\x7fELF\x02"):
                (table_at,) = struct.unpack_from("<Q", head, 40)
                entry_bytes, entries = struct.unpack_from("<HH", head, 58)
                is_damaged = about.st_size < table_at + entry_bytes * entries
            if is_damaged and time.time() - about.st_mtime > old_s:
                library.unlink()
        except OSError:  # another process has deleted it, or it is not this user's
            continue


def _keep_probes() -> None:
    """Keep on disk, beside a library of torch's cache, that it can be loaded.

    Of each of a CPU's vector instruction sets torch has a library, and asks in a new process whether it loads: in all a
    second, in each process that compiles. The library's name tells the compiler, its flags and torch.
    """
    from torch._inductor.cpu_vec_isa import VecISA

    probe = getattr(VecISA, PROBE_METHOD, None)
    if probe is None:  # an older image's torch asks in one process, and has no such method
        return

    def kept(self: VecISA, library: str) -> bool:
        seen = Path(f"{library}.loads")
        if not seen.exists() and probe(self, library):
            seen.touch()
        return seen.exists()

    if probe.__module__ != __name__:
        setattr(VecISA, PROBE_METHOD, kept)


def _keep_headers() -> None:
    """Keep on disk where the precompiled header for a compiler and its flags is.

    torch has g++ preprocess it in each process that compiles, 0.2 s, to see whether a file that it includes has
    changed. Those are torch's and the compiler's, whose versions stand in for them here.
    """
    from torch._inductor import codecache
    from torch._inductor.cpp_builder import get_compiler_version_info, get_cpp_compiler

    precompile = getattr(codecache, PRECOMPILE, None)
    if precompile is None or precompile.__module__ == __name__:  # another torch, or done
        return

    @functools.cache
    def kept(header: str, command_line: str, **command: Any) -> str:
        about = [torch.__version__, get_compiler_version_info(get_cpp_compiler()), header, command_line]
        place = Path(os.environ[CACHE_DIR], "headers", hashlib.sha256("\n".join(about).encode()).hexdigest())
        with suppress(OSError):
            if Path(f"{(path := place.read_text())}.gch").exists():
                return path
        path = precompile(header, command_line, **command)
        with suppress(OSError):  # half of a path leads nowhere
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(path)
        return path

    setattr(codecache, PRECOMPILE, kept)


def _look_up_no_names() -> None:
    """Spare torch the parsing of each file that it traces, 0.1 s, for names of functions that only its logs show."""
    from torch._dynamo import funcname_cache

    def no_names(filename: str) -> None:
        funcname_cache.cache[filename] = {}

    if "TORCH_LOGS" not in os.environ:
        funcname_cache._add_file = no_names


def _try_few_vector_sets() -> None:
    """Let torch try a CPU's vector instruction sets from the widest on until one works, and no others.

    It has g++ build and link a test of each at the first compilation (7 CPU-seconds with AVX-512, one after the other),
    and then takes the first that works, unless the user names another.
    """
    from torch._inductor import config, cpu_vec_isa

    find_all = getattr(cpu_vec_isa, VALID_SETS, None)
    find_again = getattr(find_all, "__wrapped__", None)  # it keeps its first answer
    if find_all is None or find_again is None or not hasattr(cpu_vec_isa, SUPPORTED_SETS):  # another torch, or done
        return

    @functools.lru_cache(1)
    def widest() -> list[Any]:
        supported = getattr(cpu_vec_isa, SUPPORTED_SETS)
        try:
            for vector_set in supported:
                setattr(cpu_vec_isa, SUPPORTED_SETS, [vector_set])
                if found := find_again():
                    return list(found)
            return []
        finally:
            setattr(cpu_vec_isa, SUPPORTED_SETS, supported)

    def find() -> list[Any]:
        is_named = os.environ.get("ATEN_CPU_CAPABILITY") or config.cpp.simdlen is not None
        return list(find_all()) if is_named else widest()

    setattr(cpu_vec_isa, VALID_SETS, find)


def _disable(function: Callable[..., object]) -> None:
    """Put the disabled function in the marked one's place."""
    owner: object = sys.modules[function.__module__]
    *classes, name = function.__qualname__.split(".")
    for each in classes:
        owner = getattr(owner, each)
    setattr(owner, name, torch.compiler.disable(function))
