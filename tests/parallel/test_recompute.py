"""Recomputation gives up memory for time, and no bit of the gradients."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode  # the only tensors of a device that is not there
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode  # torch documents it and gives it no public name

from argosy.models.adapters import LowRank
from argosy.models.decoder import Decoder
from argosy.models.initialize import materialize
from argosy.parallel.recompute import RecomputeMode, apply_recompute, recompute_flops_per_byte, tensors_in
from argosy.parallel.world import World
from argosy.plan.parameters import Parameter
from tiny import model_config
from workers import WorkerPool

# B batch, T tokens, D model width

B, T = 4, 32
MODES: list[RecomputeMode] = ["selective", "full"]
PARTITIONED = "aot_eager_decomp_partition"
"""What inductor does before it writes C++, which takes half a minute to compile: what is kept is decided here."""


def recomputing(
    mode: RecomputeMode, every: int = 1, dtype: torch.dtype = torch.float32, backend: str = "", **keys: Any
) -> Decoder:
    """The tiny model; always the same weights."""
    model = Decoder(model_config(**keys), dtype)
    materialize(model, model.config, torch.device("cpu"), seed=0)
    apply_recompute(((int(i), block) for i, block in model.blocks.items()), mode, every, bool(backend))
    if backend:
        for block in model.blocks.values():
            block.compile(backend=backend)
    return model


def batch(documents: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, targets and positions; the first row is cut into `documents`."""
    generator = torch.Generator().manual_seed(documents)
    tokens, targets = torch.randint(0, 400, (2, B, T), generator=generator)
    positions = torch.arange(T).repeat(B, 1)
    for start in range(3, 3 * documents, 3):
        positions[0, start:] = torch.arange(T - start)
    return tokens, targets, positions


def loss_and_gradients(model: Decoder, documents: int = 1) -> list[Tensor]:
    model.zero_grad()
    loss = model(*batch(documents))
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())]


def assert_bit_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.fixture(autouse=True)
def _each_test_compiles_anew() -> None:
    torch.compiler.reset()


class Operations(TorchDispatchMode):
    """Counts operations by name, and knows which of the memory that they allocated is alive."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()
        self._memory: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = op(*args, **(kwargs or {}))
        self.count[op.name().split("::")[1].split(".")[0]] += 1
        for tensor in tensors_in(args):  # weights and inputs, which were there before; so are views of them
            self._memory.setdefault(StorageWeakRef(tensor.untyped_storage()), 0)
        for tensor in tensors_in(output):
            storage = tensor.untyped_storage()
            self._memory.setdefault(StorageWeakRef(storage), storage.nbytes())
        return output

    @property
    def live_bytes(self) -> int:
        return sum(size for storage, size in self._memory.items() if not storage.expired())


@pytest.mark.parametrize("documents", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("mode", MODES)
def test_gradients_are_bit_for_bit_those_without(
    mode: RecomputeMode, every: int, dtype: torch.dtype, documents: int
) -> None:
    expected = loss_and_gradients(recomputing("none", dtype=dtype), documents)
    assert_bit_equal(loss_and_gradients(recomputing(mode, every, dtype), documents), expected)


@pytest.mark.parametrize(
    ("mode", "backend"),
    [
        pytest.param(mode, backend, marks=() if (mode, backend) == ("selective", PARTITIONED) else pytest.mark.slow)
        for mode in MODES
        for backend in (PARTITIONED, "inductor")
    ],
)
def test_compiled_blocks_recompute_too_and_give_the_gradients_of_compiled_blocks_without(
    mode: RecomputeMode, backend: str
) -> None:
    expected = loss_and_gradients(recomputing("none", backend=backend, layers=1))
    model = recomputing(mode, backend=backend, layers=1)
    with torch.compiler.set_stance("fail_on_recompile"), pytest.raises(RuntimeError):
        model(*batch(1))  # or the block would not be compiled at all
    assert_bit_equal(loss_and_gradients(model), expected)
    with Operations() as operations:
        loss = model(*batch(1))
    without = recomputing("none", backend=backend, layers=1)
    with Operations() as all_operations:
        its_loss = without(*batch(1))
    assert operations.live_bytes < all_operations.live_bytes
    del loss, its_loss


def test_selective_keeps_the_same_where_the_compiler_traces_sizes_as_symbols() -> None:
    model = recomputing("selective", backend=PARTITIONED, layers=1)
    loss_and_gradients(model)
    tokens, targets, positions = batch(1)
    model.zero_grad()
    with Operations() as operations:
        model(tokens[:2], targets[:2], positions[:2]).backward()  # other sizes than before
    assert operations.count["mm"] == 3 * 8  # 7 of the block and the head: forward, and two products in backward
    found = [parameter.grad for parameter in model.parameters()]
    plain = recomputing("none", layers=1)
    plain(tokens[:2], targets[:2], positions[:2]).backward()
    torch.testing.assert_close(found, [parameter.grad for parameter in plain.parameters()])


@pytest.mark.parametrize("mode", MODES)
def test_blocks_that_the_compiler_cannot_take_whole_recompute_all_the_same(mode: RecomputeMode) -> None:
    found = loss_and_gradients(recomputing(mode, backend=PARTITIONED, layers=1), documents=4)
    expected = loss_and_gradients(recomputing("none", layers=1), documents=4)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_full_keeps_the_input_of_each_block_and_selective_its_matmuls_and_attention() -> None:
    def bytes_of_a_layer(mode: RecomputeMode) -> int:
        """What two layers more keep alive between forward and backward, halved."""
        live = []
        for layers in (2, 4):
            model = recomputing(mode, layers=layers)
            with Operations() as operations:
                loss = model(*batch(1))
            live.append(operations.live_bytes)
            del loss
        return (live[1] - live[0]) // 2

    sizes = model_config()
    tokens, fp32 = B * T, 4
    block_input = tokens * sizes.width * fp32
    q = attention = tokens * sizes.heads * sizes.head_width * fp32
    k = v = tokens * sizes.kv_heads * sizes.head_width * fp32
    logsumexp = tokens * sizes.heads * fp32
    o = down = tokens * sizes.width * fp32
    gate = up = tokens * sizes.ffn_width * fp32
    assert bytes_of_a_layer("full") == block_input
    assert bytes_of_a_layer("selective") == block_input + q + k + v + attention + logsumexp + o + gate + up + down
    assert bytes_of_a_layer("none") > bytes_of_a_layer("selective")


def test_backward_computes_again_what_each_mode_did_not_keep() -> None:
    def in_backward(mode: RecomputeMode, every: int = 1) -> Counter[str]:
        loss = recomputing(mode, every)(*batch(1))
        with Operations() as operations:
            loss.backward()
        return operations.count

    none, selective, full, half = (
        in_backward("none"),
        in_backward("selective"),
        in_backward("full"),
        in_backward("full", 2),
    )
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    layers, matmuls = 2, 6  # of a layer, but the last: nothing of it is needed
    assert (none[attention], selective[attention], full[attention], half[attention]) == (0, 0, layers, 1)
    assert selective["mm"] == none["mm"]
    assert full["mm"] == none["mm"] + layers * matmuls
    assert half["mm"] == none["mm"] + matmuls
    assert (none["silu"], selective["silu"], full["silu"], half["silu"]) == (0, layers, layers, 1)
    assert none["rsqrt"] == 0 and selective["rsqrt"] == full["rsqrt"] == 2 * layers


class Adapted(nn.Module):
    """A frozen matrix with an adapter of a rank that is high beside its width."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        shapes = {"a": (rank, width), "b": (width, rank)}
        self.low_rank = LowRank({name: Parameter(shape) for name, shape in shapes.items()}, 1.0, None, 0)
        for name, parameter in self.low_rank.named_parameters():
            nn.init.normal_(parameter, generator=torch.Generator().manual_seed(len(name)))
        self.register_buffer("weight", torch.eye(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.low_rank(x, self.weight))


def test_outputs_of_an_adapter_are_computed_again_whatever_its_rank() -> None:
    """They are as wide as those of the matrix beside it, and would double what a layer keeps."""
    plain, gradients, products = Adapted(64, rank=32), [], []
    for mode in ("none", "selective"):
        block = copy.deepcopy(plain)
        apply_recompute([(0, block)], mode)
        loss = block(torch.linspace(-1, 1, 8 * 64).view(8, 64)).sum()
        with Operations() as operations:
            loss.backward()
        products.append(operations.count["mm"])
        gradients.append([parameter.grad for parameter in block.parameters()])
    assert products[1] == products[0] + 1, "those of the matrix and of the inner product are kept"
    assert_bit_equal(gradients[1], gradients[0])


class Dropped(nn.Module):
    """A block with dropout, which our own has not."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.dropout(F.gelu(self.up(x)), 0.3))


@pytest.mark.parametrize("mode", MODES)
def test_dropout_drops_the_same_again(mode: RecomputeMode) -> None:
    torch.manual_seed(1)
    plain = Dropped(16)
    recomputed = copy.deepcopy(plain)
    apply_recompute([(0, recomputed)], mode)
    gradients = []
    for block in (plain, recomputed):
        torch.manual_seed(2)
        block(torch.ones(8, 16)).sum().backward()
        gradients.append([parameter.grad for parameter in block.parameters()])
    assert_bit_equal(gradients[1], gradients[0])


@pytest.mark.parametrize("mode", MODES)
def test_names_stay_and_a_copy_computes_with_its_own_weights(mode: RecomputeMode) -> None:
    model = recomputing(mode)
    assert list(model.state_dict()) == list(recomputing("none").state_dict())
    twin = copy.deepcopy(model)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    assert_bit_equal(loss_and_gradients(twin), loss_and_gradients(recomputing("none")))


def test_without_gradients_nothing_changes_and_a_cache_may_be_given() -> None:
    tokens = batch(1)[0]
    logits = []
    for mode in ("none", "full"):
        model = recomputing(mode)
        with torch.no_grad():
            logits.append(model(tokens, cache=model.new_cache(T)))
    assert_bit_equal(logits[1:], logits[:1])


class Rows(nn.Module):
    """Row-parallel and column-parallel in one: sums over ranks, in place, a matmul's result that is dear."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(width) * 0.5 + 0.01)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(_Summed.apply(x @ self.weight)) ** 2


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        dist.all_reduce(x)  # without a word to autograd, as Megatron-LM's and many others' do
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


def gradients_through_a_sum(world: World) -> tuple[list[list[Tensor]], list[int]]:
    gradients, collectives = [], []
    for mode in ("none", "selective", "full"):
        block = Rows(32)
        apply_recompute([(0, block)], mode)
        x = torch.linspace(0, 1 + world.rank, 64).view(2, 32).requires_grad_()
        loss = block(x).sum()
        with Operations() as operations:
            loss.backward()
        gradients.append([loss.detach(), x.grad, block.weight.grad])
        collectives.append(operations.count["allreduce_"])
    return gradients, collectives


def test_a_kept_result_that_was_summed_over_ranks_in_place_is_not_summed_twice(workers: WorkerPool) -> None:
    for (none, selective, full), collectives in workers.run(2, gradients_through_a_sum):
        assert_bit_equal(selective, none)
        assert_bit_equal(full, none)
        assert collectives == [1, 1, 2]


def flops_per_byte(compute: Callable[[], Any]) -> dict[str, float]:
    """Return FLOPs over bytes of each operation in `compute`."""
    costs = {}

    class Costs(TorchDispatchMode):
        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            output = op(*args, **(kwargs or {}))
            costs[str(op.overloadpacket)] = recompute_flops_per_byte(op, args, kwargs or {}, output)
            return output

    with torch.no_grad(), Costs():
        compute()
    return {name: cost for name, cost in costs.items() if cost > 0}


def test_the_cost_of_a_matmul_is_twice_its_inner_dimension_over_the_size_of_an_element() -> None:
    x, weight = torch.ones(5, 64), torch.ones(7, 64)
    assert flops_per_byte(lambda: F.silu(F.linear(x, weight))) == {"aten.mm": 2 * 64 / 4}
    x, weight = x.bfloat16(), torch.ones(3, 64, 16, dtype=torch.bfloat16)
    ends = torch.tensor([1, 3, 5], dtype=torch.int32)
    assert flops_per_byte(lambda: F.grouped_mm(x, weight, offs=ends)) == {"aten._grouped_mm": 2 * 64 / 2}


def test_the_cost_of_attention_grows_with_the_tokens_attended_to() -> None:
    def attend(tokens: int) -> Tensor:
        q = k = v = torch.ones(1, 4, tokens, 16)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    ((name, short),) = flops_per_byte(lambda: attend(64)).items()
    assert name == "aten._scaled_dot_product_flash_attention_for_cpu"
    assert short == pytest.approx(4 * 64 / 4, rel=0.1)  # the log-sum-exp takes memory too
    assert flops_per_byte(lambda: attend(256)) == {name: 4 * short}


def test_the_cost_of_attention_inside_documents_is_that_of_documents_of_their_mean_length() -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.varlen import varlen_attn

    with FakeTensorMode(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # to choose one, torch would ask the GPU
        q = torch.ones(1024, 4, 64, dtype=torch.bfloat16, device="cuda")
        starts = torch.zeros(1 + 8, dtype=torch.int32, device="cuda")
        costs = flops_per_byte(lambda: varlen_attn(q, q, q, starts, starts, 1024, 1024, window_size=(-1, 0)))
    assert costs == {"torch_attn._varlen_attn": pytest.approx(4 * 128 / 2, rel=0.1)}
