"""A torch without CUDA that believes in a GPU: enough of one for the compiler to make its code for it.

`load` comes before torch is imported, whose C++ looks for its CUDA part once; `answer` after it. Tensors on `cuda` are
those of torch's FakeTensorMode, with shapes and no memory: nothing can be computed.
"""

from __future__ import annotations

import ctypes
import importlib.util
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

CUDA_PART = r"""
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace {
struct Guard : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  static c10::Device at() { return c10::Device(c10::DeviceType::CUDA, 0); }
  static c10::Stream stream() { return c10::Stream(c10::Stream::DEFAULT, at()); }
  c10::Device exchangeDevice(c10::Device) const override { return at(); }
  c10::Device getDevice() const override { return at(); }
  c10::Stream getStream(c10::Device) const noexcept override { return stream(); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return stream(); }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)
struct CUDAHooks : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex current_device() const override { return 0; }
  int getNumGPUs() const override { return 1; }
};
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks)
// As on a GPU: FlashAttention (1) for half precision without a mask, else the plain formula (0).
int64_t backend_of(const at::Tensor& q, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>& mask,
                   double, bool, std::optional<double>, bool) {
  bool is_half = q.scalar_type() == at::kBFloat16 || q.scalar_type() == at::kHalf;
  return is_half && !mask && q.sym_size(-1) <= 256;
}
const bool chosen = (at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&backend_of), true);
}  // namespace
"""
CAPABILITIES = {"sm_90": (9, 0, 132), "sm_100": (10, 0, 148)}
"""Architecture -> compute capability, and multiprocessors: of an H100 SXM and a B200."""
SM_LIMITS = {
    "regs_per_multiprocessor": 65536,
    "max_threads_per_multi_processor": 2048,
    "max_threads_per_block": 1024,
    "warp_size": 32,
    "shared_memory_per_block": 49152,
    "shared_memory_per_block_optin": 232448,
    "shared_memory_per_multiprocessor": 233472,
    "is_integrated": 0,
    "gcnArchName": "",
}
"""Of both (NVIDIA's tables of compute capabilities); the last is AMD's."""


def load() -> None:
    """Give torch, which is not imported yet, its CUDA part; needs g++."""
    found = importlib.util.find_spec("torch")
    assert found is not None and found.origin is not None
    torch = Path(found.origin).parent
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "cuda_part.cpp"), Path(folder, "cuda_part.so")
        source.write_text(CUDA_PART)
        links = (f"-L{torch}/lib", f"-Wl,-rpath,{torch}/lib", "-lc10", "-ltorch_cpu")
        options = ("-O0", "-shared", "-fPIC", "-std=c++20", f"-I{torch}/include")
        subprocess.run(["g++", *options, str(source), "-o", str(library), *links], check=True)
        ctypes.CDLL(f"{torch}/lib/libtorch_global_deps.so", mode=ctypes.RTLD_GLOBAL)
        ctypes.CDLL(str(library))


def answer(architecture: str) -> None:
    """Answer what the compiler asks of `torch.cuda` and of Triton's driver, for a GPU of `architecture`."""
    import torch
    import triton
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor.fx_passes import joint_graph
    from torch._inductor.runtime import triton_helpers
    from torch.utils._python_dispatch import TorchDispatchMode
    from triton.backends.compiler import GPUTarget

    major, minor, processors = CAPABILITIES[architecture]
    properties = SimpleNamespace(
        name=architecture, major=major, minor=minor, multi_processor_count=processors, **SM_LIMITS
    )
    answers: dict[str, Any] = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_properties": properties,
        "get_device_capability": (major, minor),
        "get_device_name": architecture,
        "is_bf16_supported": True,
        "get_rng_state": torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": None,
        "synchronize": None,
        "set_device": None,
        "_exchange_device": 0,
        "_maybe_exchange_device": 0,
        "_lazy_init": None,
    }
    for name, value in answers.items():
        setattr(torch.cuda, name, _always(value))  # a function each: the compiler keys them by identity
        if hasattr(CudaInterface, name):
            setattr(CudaInterface, name, staticmethod(_always(value)))
    CudaInterface.Worker.get_device_properties = staticmethod(_always(properties))  # type: ignore[method-assign]
    CudaInterface.Worker.current_device = staticmethod(_always(0))  # type: ignore[method-assign]
    target = GPUTarget("cuda", major * 10 + minor, 32)
    driver = SimpleNamespace(get_current_target=_always(target), get_current_device=_always(0))
    triton.runtime.driver.set_active(driver)
    triton_helpers.set_driver_to_gpu = _always(None)  # which each kernel's file calls

    # Where the compiler computes constants, it computes on the GPU.
    class OnHost(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            on_host = {} if (kwargs or {}).get("device") is None else {"device": torch.device("cpu")}
            return func(*args, **(kwargs or {}) | on_host)

    folder, patterns = joint_graph.UniformValueConstantFolder, joint_graph.lazy_init
    deduce = folder._deduce_value

    def deduce_on_host(self: Any, node: Any) -> Any:
        with OnHost():
            return deduce(self, node)

    folder._deduce_value = deduce_on_host  # type: ignore[method-assign]
    joint_graph.lazy_init = lambda *_: patterns(torch.device("cpu"))


def _always(value: Any) -> Any:
    return lambda *_, **__: value
