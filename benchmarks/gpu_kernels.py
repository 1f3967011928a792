"""The compiler's kernels for a GPU that is absent: the decoder's step, traced and compiled for it as far as that goes.

    pip install --no-deps --target /tmp/triton triton==3.7.1 torchao    # as constraints.txt has triton
    PYTHONPATH=/tmp/triton python benchmarks/gpu_kernels.py --architecture sm_90 --out sm_90.json

Each model's blocks, norm and loss are compiled as a run does, on fake tensors of the GPU (`absent_gpu.py`). Each Triton
kernel that Inductor writes is then compiled, in all configurations that it would choose from, to PTX and by `ptxas` to
machine code. No kernel runs.
"""

from __future__ import annotations

import absent_gpu  # before torch, whose C++ looks for its CUDA part when it is loaded

absent_gpu.load()

# ruff: noqa: E402
import copy
import json
import re
import subprocess
import tempfile
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import date
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, Literal

import torch
import torch._dynamo
import torch._functorch.config
import torch._inductor.compile_fx as inductor
import triton
import tyro
from torch._dynamo.utils import counters
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._inductor.graph import GraphLowering
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from argosy.config.model import ModelConfig
from argosy.config.optimizer import OptimizerConfig
from argosy.models.attention import Documents
from argosy.models.decoder import Decoder
from argosy.optim.optimizer import Optimizer
from argosy.optim.piece import Piece
from argosy.parallel.apply import compile_blocks
from argosy.plan.plan import FP8
from argosy.precision import use_fp8

SIZES: dict[str, Any] = {
    "layers": 2,
    "width": 4096,
    "heads": 32,
    "kv_heads": 8,
    "head_width": 128,
    "ffn_width": 14336,
    "vocab_size": 128256,
}
"""A block of Llama 3.1 8B; further ones are alike."""
ROWS, TOKENS = 2, 4096
MODELS: dict[str, dict[str, Any]] = {
    "dense": {},
    "experts": {"width": 2048, "heads": 32, "kv_heads": 4, "qk_norm": True}
    | {"moe": {"experts": 128, "experts_per_token": 8, "expert_ffn_width": 768, "balance": "bias"}},
    "window": {"attention": {"layers": ["sliding", "full"], "window": 1024}},
    "softcap": {"attention": {"softcap": 30.0}},
    "fp8": {},
    "fp8_rowwise": {},
    "fp8_blockwise": {},
    "mxfp8": {},
}
UPDATE = "int8_state"
"""Beside the models: AdamW's update of a block's matrices, with moments in eight bits and no fp32 copy of weights."""
DOCUMENTS = (1, 3, 5, 9, 17)
"""Documents of the first row, step by step."""
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
KERNEL = re.compile(r"async_compile\.triton\('(\w+)', '''(.*?)''', device_str='cuda'\)", re.DOTALL)
CALL = re.compile(r"extern_kernels\.\w+|torch\.ops\.[\w.]+(?=\()")
USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


@dataclass
class Options:
    architecture: Literal["sm_90", "sm_100"] = "sm_90"
    """GPU: Hopper or Blackwell."""
    models: tuple[str, ...] = (*MODELS, UPDATE)
    """Kinds of model."""
    out: Path | None = None
    """JSON file of the figures."""


@dataclass
class Traced:
    """What a few steps of one model were compiled to."""

    code: list[str] = field(default_factory=list)
    """Inductor's modules."""
    graphs_a_step: list[int] = field(default_factory=list)
    """Graphs that each step compiled, forward and backward counted apart."""
    breaks: dict[str, int] = field(default_factory=dict)


@dataclass
class Compiled:
    """One configuration of a kernel, in machine code."""

    kernel: str
    registers: int
    """A thread's; 255 is the most there is."""
    local_bytes: int
    """A thread's stack and spills."""
    shared_bytes: int
    """A block's."""
    ptx_bytes: int
    error: str = ""


class WrittenDown(BaseException):
    """Inductor's code exists: it would now be loaded, and the GPU asked for."""


def trace(kind: str) -> Traced:
    """Do a step of the model `kind` for each of `DOCUMENTS`."""
    torch.compiler.reset()
    counters.clear()
    traced = Traced()

    def write_down(graph: GraphLowering) -> None:
        traced.code.append(graph.codegen()[0].value)
        raise WrittenDown

    def compiled(graph: torch.fx.GraphModule, inputs: Any, **options: Any) -> Any:
        as_it_was = copy.deepcopy(graph)
        with suppress(WrittenDown):
            compile_inner(graph, inputs, **options)
        return make_boxed_func(as_it_was.forward)

    compile_all, compile_inner = inductor.compile_fx, inductor.compile_fx_inner
    to_module = GraphLowering.compile_to_module
    GraphLowering.compile_to_module = write_down  # type: ignore[assignment, method-assign]
    inductor.compile_fx = partial(compile_all, inner_compile=compiled)
    try:
        (_updates if kind == UPDATE else partial(_steps, kind))(traced)
    finally:
        inductor.compile_fx, GraphLowering.compile_to_module = compile_all, to_module  # type: ignore[method-assign]
    traced.breaks = dict(counters["graph_break"])
    return traced


def _steps(kind: str, traced: Traced) -> None:
    config = ModelConfig.model_validate(SIZES | MODELS[kind])
    model, device = Decoder(config, torch.bfloat16), torch.device("cuda", 0)
    if kind in FP8:
        use_fp8(model, device, kind)
    compile_blocks(model, enabled=True)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device=device)
        tokens, positions = torch.zeros(2, ROWS, TOKENS, dtype=torch.int64, device=device)
        for documents in DOCUMENTS:
            before = len(traced.code)
            first = torch.arange(documents, dtype=torch.int32) * 64
            starts = torch.cat((first, torch.arange(1, ROWS + 1, dtype=torch.int32) * TOKENS))
            rows = Documents(torch.empty(len(starts), dtype=torch.int32, device=device), starts)
            model(tokens, tokens, positions, rows).backward()
            traced.graphs_a_step.append(len(traced.code) - before)


def _updates(traced: Traced) -> None:
    shapes = {"k": (1024, 4096), "q": (4096, 4096), "up": (14336, 4096), "down": (4096, 14336), "norm": (4096,)}
    with FakeTensorMode(allow_non_fake_inputs=True):
        values = {name: torch.empty(shape, dtype=torch.bfloat16, device="cuda") for name, shape in shapes.items()}
        pieces = [Piece(name, value, shapes[name]) for name, value in values.items()]
        optimizer = Optimizer(pieces, OptimizerConfig(kind="adamw", state="int8"), is_compiled=True)
        for _ in DOCUMENTS:
            before = len(traced.code)
            for value in values.values():
                value.grad = torch.empty_like(value)
            optimizer.step()
            traced.graphs_a_step.append(len(traced.code) - before)


def compile_kernel(name: str, source: str, folder: Path, architecture: str) -> list[Compiled]:
    """Compile all configurations of a kernel of Inductor's."""
    file = folder / f"{name}_{abs(hash(source))}.py"
    file.write_text(source)
    spec = spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    tuner, results = getattr(module, name), []
    for config in tuner.configs:
        meta = tuner._create_compile_meta(config)
        whole = ASTSource(tuner.fn, meta["signature"], meta["constants"], meta["configs"][0])
        target = GPUTarget("cuda", int(architecture.removeprefix("sm_")), 32)
        try:
            kernel = triton.compile(whole, target=target, options=tuner._create_compile_options(config, meta))
        except Exception as error:
            results.append(Compiled(name, 0, 0, 0, 0, f"{type(error).__name__}: {error}"))
            continue
        cubin = folder / "kernel.cubin"
        cubin.write_bytes(kernel.asm["cubin"])
        dumped = subprocess.run([CUOBJDUMP, "--dump-resource-usage", cubin], check=True, capture_output=True, text=True)
        usage = USAGE.search(dumped.stdout)
        assert usage is not None, dumped.stdout
        registers, stack, _, local = map(int, usage.groups())
        results.append(Compiled(name, registers, stack + local, kernel.metadata.shared, len(kernel.asm["ptx"])))
    return results


def main(options: Options) -> None:
    """Print a line for each model, and write the figures."""
    absent_gpu.answer(options.architecture)
    torch._inductor.config.fx_graph_cache = False
    torch._functorch.config.enable_autograd_cache = False
    models: dict[str, Any] = {}
    versions = {"torch": torch.__version__, "triton": triton.__version__}
    print(f"{date.today()}, {options.architecture}, {versions}")
    for kind in options.models:
        try:
            traced = trace(kind)
        except Exception as error:
            models[kind] = {"error": f"{type(error).__name__}: {error}"}
            print(f"{kind:11} fails: {models[kind]['error'].splitlines()[0]}", flush=True)
            continue
        kernels = dict.fromkeys(found for code in traced.code for found in KERNEL.findall(code))
        with tempfile.TemporaryDirectory() as folder:
            make = partial(compile_kernel, folder=Path(folder), architecture=options.architecture)
            compiled = [each for name, source in kernels for each in make(name, source)]
        good = [each for each in compiled if not each.error]
        spilled = [each for each in good if each.local_bytes]
        calls = Counter(
            call for code in traced.code for call in re.findall(r"extern_kernels\.\w+|torch\.ops\.[\w.]+(?=\()", code)
        )
        models[kind] = {
            "graphs_a_step": traced.graphs_a_step,
            "graph_breaks": traced.breaks,
            "kernels": len(kernels),
            "configurations": len(compiled),
            "compiled": len(good),
            "most_registers": max((each.registers for each in good), default=0),
            "most_shared_bytes": max((each.shared_bytes for each in good), default=0),
            "spilling": [asdict(each) for each in spilled],
            "errors": [asdict(each) for each in compiled if each.error],
            "calls_of_libraries": dict(calls),
        }
        words = [
            f"graphs by step {traced.graphs_a_step}, breaks {sum(traced.breaks.values())}",
            f"{len(kernels)} kernels in {len(compiled)} configurations, compiled {len(good)}",
            f"registers <= {models[kind]['most_registers']}, shared <= {models[kind]['most_shared_bytes']} bytes",
            f"with local memory {len(spilled)}",
        ]
        print(f"{kind:11}", "; ".join(words), flush=True)
    if options.out is not None:
        found = {
            "date": str(date.today()),
            "architecture": options.architecture,
            "versions": versions,
            "models": models,
        }
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Options))
