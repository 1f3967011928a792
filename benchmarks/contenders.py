"""The contenders of `train_step.py`: each trains the same model on the same tokens, in its own process, in turns.

Run by `train_step.py`, never by hand. The parent writes a number of steps on standard input; the contender takes
them, answers with their seconds (one line of JSON), and waits. The first step is taken unasked.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from argosy.config.model import ModelConfig

# B batch, T tokens, D model width, H heads, E head width, N tokens of a batch, K experts of a token

TOP_K = 2

LEARNING_RATE, BETAS, EPS, WEIGHT_DECAY, MAX_NORM = 1e-3, (0.9, 0.95), 1e-8, 0.1, 1.0
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
BATCHES = 16
"""Different batches; after them the first comes again."""
END_OF_DOCUMENT = 0


@dataclass(frozen=True)
class Setting:
    """What every contender trains, and on what."""

    layers: int = 6
    """Decoder blocks."""
    width: int = 384
    """Residual stream width; heads are 64 wide."""
    ffn_width: int = 1024
    """Hidden width of the SwiGLU feed-forward, or of one expert."""
    experts: int = 0
    """Experts of each layer, of which a token takes two, as in Mixtral, without a balance loss; 0: dense layers."""
    vocab_size: int = 4096
    """Tokens in the vocabulary; embedding and head are not tied."""
    seq_len: int = 512
    """Tokens per sample."""
    batch: int = 8
    """Samples per optimizer step."""
    precision: str = "fp32"
    """fp32 or bf16 (weights and optimizer stay fp32)."""
    threads: int = 2
    """CPU threads of the one process that computes."""
    device: str = "cpu"
    """cpu or cuda."""
    documents: bool = False
    """Pack documents of 200 tokens on average; only Argosy keeps their attention apart."""

    @property
    def heads(self) -> int:
        return self.width // 64

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.seq_len

    def parameters(self) -> int:
        """What every contender must have."""
        block = 4 * self.width**2 + 3 * self.width * self.ffn_width * max(self.experts, 1) + 2 * self.width
        block += self.experts * self.width
        return self.layers * block + 2 * self.vocab_size * self.width + self.width

    def config(self) -> ModelConfig:
        """Return what Argosy calls the model."""
        moe = {"experts": self.experts, "expert_ffn_width": self.ffn_width, "balance": "none"}
        return ModelConfig.model_validate(
            {
                "layers": self.layers,
                "width": self.width,
                "heads": self.heads,
                "kv_heads": self.heads,
                "ffn_width": self.ffn_width,
                "vocab_size": self.vocab_size,
                "moe": moe if self.experts else {},
            }
        )

    def rows(self) -> Tensor:
        """Token ids [BATCHES * B, T + 1]; mark 0 ends a document."""
        generator = torch.Generator().manual_seed(0)
        shape = (BATCHES * self.batch, self.seq_len + 1)
        rows = torch.randint(1, self.vocab_size, shape, generator=generator)
        if self.documents:
            rows[torch.rand(shape, generator=generator) < 1 / 200] = END_OF_DOCUMENT
        return rows

    def batches(self) -> Iterator[Tensor]:
        """Token ids [B, T + 1], without end."""
        return itertools.cycle(self.rows().split(self.batch))


class Turns:
    """The contender's end of the line: call `step_done` after every step, and it says when to go on."""

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # whatever a library prints is not an answer
        self._allowed, self._seconds = 1, list[float]()
        self._since = time.perf_counter()

    def step_done(self) -> None:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # not every contender waits for the device by itself
        self._seconds.append(time.perf_counter() - self._since)
        if len(self._seconds) == self._allowed:
            self._allowed = self.take(seconds=self._seconds)
            self._seconds = []
        self._since = time.perf_counter()

    def take(self, **answer: Any) -> int:
        """Give the answer to the last turn, wait for the next; returns its length."""
        print(json.dumps(answer), file=self._answers, flush=True)
        line = sys.stdin.readline()
        if not line:
            sys.exit()
        return int(line)


def argosy(setting: Setting, turns: Turns, compiled: bool) -> None:
    """Run the training step (`argosy.training.step`) without the trainer around it."""
    from argosy.config.data import DataConfig
    from argosy.config.optimizer import OptimizerConfig
    from argosy.config.schema import RunConfig
    from argosy.config.train import TrainConfig
    from argosy.models.microbatch import microbatches
    from argosy.observe.clock import StepClock
    from argosy.parallel.apply import apply
    from argosy.parallel.world import World, keep_freed_memory
    from argosy.plan.plan import Plan
    from argosy.training.state import TrainState
    from argosy.training.step import Step

    run = RunConfig(
        model=setting.config(),
        data=DataConfig(seq_len=setting.seq_len),
        train=TrainConfig(steps=1, global_batch=setting.batch),
        optimizer=OptimizerConfig(lr=LEARNING_RATE, grad_clip=MAX_NORM),
    )
    if setting.device == "cpu":
        keep_freed_memory()
    world = World(device=torch.device("cuda:0" if setting.device == "cuda" else setting.device))
    plan = Plan.model_validate({"microbatch": setting.batch, "precision": setting.precision, "compile": compiled})
    model = apply(plan, run, world)
    _check(setting, (piece.value for piece in model.pieces))
    clock = StepClock(world.device)
    step = Step(run, TrainState.begin(model, plan, run), world, clock)
    for rows in setting.batches():
        batch = microbatches(rows.numpy(), setting.batch, END_OF_DOCUMENT, world.device)
        outcome = step.exchange(step.forward_backward(batch))
        step.apply(step.update(outcome, LEARNING_RATE))
        clock.lap()
        turns.step_done()


def plain(setting: Setting, turns: Turns, compiled: bool) -> None:
    """A loop in the manner of nanoGPT, around a model in its manner with Llama's parts."""
    _plain_loop(setting, turns, compiled, PlainDecoder(setting), lambda model, x, y: model(x, y))


def litgpt(setting: Setting, turns: Turns, compiled: bool) -> None:
    """litgpt's model and loss in the same plain loop."""
    from litgpt import GPT, Config
    from litgpt.utils import chunked_cross_entropy

    config = Config(
        n_layer=setting.layers,
        n_embd=setting.width,
        n_head=setting.heads,
        intermediate_size=setting.ffn_width,
        vocab_size=setting.vocab_size,
        padded_vocab_size=setting.vocab_size,
        block_size=setting.seq_len,
        norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMoE" if setting.experts else "LLaMAMLP",
        n_expert=setting.experts,
        n_expert_per_token=TOP_K if setting.experts else 0,
        bias=False,
        parallel_residual=False,
        rotary_percentage=1.0,
    )
    # One chunk of logits, as the other peers have it; its default is 128 tokens a chunk.
    _plain_loop(setting, turns, compiled, GPT(config), lambda model, x, y: chunked_cross_entropy(model(x), y, 0))


def huggingface(setting: Setting, turns: Turns, compiled: bool) -> None:
    """`Trainer` with `LlamaForCausalLM` or `MixtralForCausalLM`; it logs, saves and evaluates nothing."""
    from transformers import (
        AutoModelForCausalLM,
        LlamaConfig,
        MixtralConfig,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    class AfterEachStep(TrainerCallback):  # type: ignore[misc]  # mypy does not read it
        def on_step_end(self, *_: Any, **__: Any) -> None:
            turns.step_done()

    mixture: dict[str, Any] = {
        "num_local_experts": setting.experts,
        "num_experts_per_tok": TOP_K,
        "sliding_window": None,
    }
    config_class: Any = MixtralConfig if setting.experts else LlamaConfig
    config = config_class(
        vocab_size=setting.vocab_size,
        hidden_size=setting.width,
        intermediate_size=setting.ffn_width,
        num_hidden_layers=setting.layers,
        num_attention_heads=setting.heads,
        num_key_value_heads=setting.heads,
        max_position_embeddings=setting.seq_len,
        use_cache=False,
        attn_implementation="sdpa",
        tie_word_embeddings=False,
        **(mixture if setting.experts else {}),
    )
    model = AutoModelForCausalLM.from_config(config)
    _check(setting, model.parameters())
    # It shifts the labels by itself, so that each row has one target less.
    rows = [{"input_ids": row, "labels": row} for row in setting.rows()[:, :-1]]
    arguments = TrainingArguments(
        output_dir=tempfile.gettempdir(),
        max_steps=10**6,
        per_device_train_batch_size=setting.batch,
        optim="adamw_torch_fused",
        learning_rate=LEARNING_RATE,
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        adam_epsilon=EPS,
        weight_decay=WEIGHT_DECAY,
        max_grad_norm=MAX_NORM,
        lr_scheduler_type="constant",
        torch_compile=compiled,
        bf16=setting.precision == "bf16",
        use_cpu=setting.device == "cpu",
        dataloader_pin_memory=setting.device != "cpu",
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    Trainer(model, arguments, train_dataset=rows, callbacks=[AfterEachStep()]).train()


def torchtitan(setting: Setting, turns: Turns, compiled: bool) -> None:
    """torchtitan's Llama 3 and the parts of its trainer, put together as that does on one GPU: with autocast, without
    FSDP, which it takes from two ranks on, and without recomputation, as the others."""
    if setting.experts:
        sys.exit("torchtitan trains dense models here, its Llama 3 has no experts: leave it out of --contenders")
    from torchtitan.components.loss import build_cross_entropy_loss
    from torchtitan.components.optimizer import build_optimizers
    from torchtitan.config import JobConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed.utils import clip_grad_norm_, maybe_enable_amp
    from torchtitan.models.llama3 import Transformer, TransformerModelArgs, parallelize_llama
    from torchtitan.tools.utils import GarbageCollection

    config = JobConfig()
    config.training.seq_len, config.training.max_norm = setting.seq_len, MAX_NORM
    config.training.mixed_precision_param = {"fp32": "float32", "bf16": "bfloat16"}[setting.precision]
    config.optimizer.lr, (config.optimizer.beta1, config.optimizer.beta2) = LEARNING_RATE, BETAS
    config.optimizer.eps, config.optimizer.weight_decay = EPS, WEIGHT_DECAY
    config.compile.enable, config.activation_checkpoint.mode = compiled, "none"
    sizes = TransformerModelArgs(
        dim=setting.width,
        n_layers=setting.layers,
        n_heads=setting.heads,
        vocab_size=setting.vocab_size,
        multiple_of=setting.ffn_width,  # what the next line makes two thirds of this is rounded up to it
        ffn_dim_multiplier=setting.ffn_width / (4 * setting.width),
    )
    sizes.update_from_config(config)
    one = ParallelDims(dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=1, ep=1, etp=1, world_size=1)
    with torch.device("meta"):
        model = Transformer(sizes)
    _check(setting, model.parameters())
    model = parallelize_llama(model, one, config)
    model.to_empty(device=setting.device)
    with torch.no_grad():
        model.init_weights()
    loss_of = build_cross_entropy_loss(config)
    optimizer = build_optimizers([model], config.optimizer, one)
    precision = maybe_enable_amp(one, config.training.mixed_precision_param, setting.device)
    garbage = GarbageCollection(config.training.gc_freq)
    for step, rows in enumerate(setting.batches(), start=1):
        garbage.run(step)
        optimizer.zero_grad()
        inputs, targets = (tokens.contiguous().to(setting.device) for tokens in (rows[:, :-1], rows[:, 1:]))
        with precision:
            logits = model(inputs)
            loss = loss_of(logits, targets) / targets.numel()  # it is a sum
        del logits
        loss.backward()
        clip_grad_norm_(list(model.parameters()), config.training.max_norm, foreach=True)
        optimizer.step()
        loss.item()
        turns.step_done()


def matmuls(setting: Setting, turns: Turns) -> None:
    """The peak, measured in turns of its own: of a square matmul, and of the model's own shapes.

    The model's are every linear layer's forward, gradient to the input, gradient to the weight, each on its own, into
    memory that is there already (into new memory where oneDNN is faster). Answers with FLOP/s, those of the shapes
    being all FLOPs over all seconds.
    """
    dtype, side = DTYPES[setting.precision], 1024 if setting.device == "cpu" else 8192
    torch.set_default_device(setting.device)
    N, D, M, V = setting.tokens_per_step, setting.width, setting.ffn_width, setting.vocab_size
    n, L = (N * TOP_K // setting.experts, setting.layers * setting.experts) if setting.experts else (N, setting.layers)
    layers = {(N, D, D): 4 * setting.layers, (n, D, M): 2 * L, (n, M, D): L, (N, D, V): 1}  # the router is next to none
    sizes = [size for rows, a, b in layers for size in ((rows, a, b), (rows, b, a), (b, rows, a))]
    counts = [count for count in layers.values() for _ in range(3)]
    flops = sum(2 * count * n * k * m for count, (n, k, m) in zip(counts, sizes, strict=True))
    operands = [_operands(layout, a, b, rows, dtype) for rows, a, b in layers for layout in range(3)]
    square = tuple(torch.randn(side, side).to(dtype) for _ in range(3))

    allowed = turns.take(square=[], shapes=[])
    while True:
        rates: dict[str, list[float]] = {"square": [], "shapes": []}
        for _ in range(2 * allowed):
            rates["square"] += [2 * side**3 / _matmul_s(*square) for _ in range(20)]
            seconds = sum(count * _matmul_s(*each) for count, each in zip(counts, operands, strict=True))
            rates["shapes"].append(flops / seconds)
        allowed = turns.take(**rates)


CONTENDERS: dict[str, Callable[[Setting, Turns], None]] = {
    "argosy": partial(argosy, compiled=True),
    "argosy-eager": partial(argosy, compiled=False),
    "huggingface": partial(huggingface, compiled=True),
    "huggingface-eager": partial(huggingface, compiled=False),
    "litgpt": partial(litgpt, compiled=True),
    "litgpt-eager": partial(litgpt, compiled=False),
    "plain": partial(plain, compiled=True),
    "plain-eager": partial(plain, compiled=False),
    "torchtitan": partial(torchtitan, compiled=True),
    "torchtitan-eager": partial(torchtitan, compiled=False),
    "matmuls": matmuls,
}


class PlainDecoder(nn.Module):
    """nanoGPT's model with Llama's parts: RMSNorm, rotary positions, SwiGLU, no biases."""

    def __init__(self, setting: Setting):
        super().__init__()
        self.embedding = nn.Embedding(setting.vocab_size, setting.width)
        self.blocks = nn.ModuleList(PlainBlock(setting) for _ in range(setting.layers))
        self.norm = nn.RMSNorm(setting.width, 1e-5)
        self.head = nn.Linear(setting.width, setting.vocab_size, bias=False)
        angles_TE = torch.arange(setting.seq_len)[:, None] * 10_000.0 ** (-torch.arange(0, 64, 2) / 64).repeat(2)
        self.register_buffer("cos", angles_TE.cos(), persistent=False)
        self.register_buffer("sin", angles_TE.sin(), persistent=False)

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        x_BTD = self.embedding(tokens_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD, self.cos, self.sin)
        logits_BTV = self.head(self.norm(x_BTD))
        return F.cross_entropy(logits_BTV.flatten(0, 1).float(), targets_BT.flatten())


class PlainBlock(nn.Module):
    def __init__(self, setting: Setting):
        super().__init__()
        self.heads = setting.heads
        self.attention_norm, self.mlp_norm = (nn.RMSNorm(setting.width, 1e-5) for _ in range(2))
        self.qkv = nn.Linear(setting.width, 3 * setting.width, bias=False)
        self.out = nn.Linear(setting.width, setting.width, bias=False)
        self.mlp = PlainExperts(setting) if setting.experts else PlainMLP(setting)

    def forward(self, x_BTD: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
        qkv = self.qkv(self.attention_norm(x_BTD)).chunk(3, dim=-1)
        q, k, v = (x.unflatten(-1, (self.heads, -1)).transpose(1, 2) for x in qkv)
        q, k = (x * cos_TE + torch.cat((-x[..., 32:], x[..., :32]), -1) * sin_TE for x in (q, k))
        y_BHTE = F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v, is_causal=True)
        x_BTD = x_BTD + self.out(y_BHTE.transpose(1, 2).flatten(2))
        return x_BTD + self.mlp(self.mlp_norm(x_BTD))


class PlainMLP(nn.Module):
    def __init__(self, setting: Setting):
        super().__init__()
        self.gate, self.up = (nn.Linear(setting.width, setting.ffn_width, bias=False) for _ in range(2))
        self.down = nn.Linear(setting.ffn_width, setting.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return y


class PlainExperts(nn.Module):
    """Mixtral's layer as its first public code had it: one expert after the other takes its tokens."""

    def __init__(self, setting: Setting):
        super().__init__()
        self.router = nn.Linear(setting.width, setting.experts, bias=False)
        self.experts = nn.ModuleList(PlainMLP(setting) for _ in range(setting.experts))

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_ND = x_BTD.flatten(0, 1)
        logits_NK, experts_NK = self.router(x_ND).float().topk(TOP_K)
        weights_NK = logits_NK.softmax(-1).to(x_ND.dtype)
        y_ND = torch.zeros_like(x_ND)
        for number, expert in enumerate(self.experts):
            tokens, choice = torch.where(experts_NK == number)
            of_expert = expert(x_ND[tokens]) * weights_NK[tokens, choice, None]
            y_ND = y_ND.index_add(0, tokens, of_expert.to(x_ND.dtype))
        return y_ND.view_as(x_BTD)


def _plain_loop(
    setting: Setting,
    turns: Turns,
    compiled: bool,
    model: nn.Module,
    loss_of: Callable[[Any, Tensor, Tensor], Tensor],
) -> None:
    _check(setting, model.parameters())
    model.to(setting.device)
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=BETAS, eps=EPS, fused=True)
    called = torch.compile(model) if compiled else model
    for on_host in setting.batches():
        rows = on_host.to(setting.device)
        with _precision(setting):
            loss = loss_of(called, rows[:, :-1].contiguous(), rows[:, 1:].contiguous())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()
        turns.step_done()


def _precision(setting: Setting) -> AbstractContextManager[Any]:
    return nullcontext() if setting.precision == "fp32" else torch.autocast(setting.device, DTYPES[setting.precision])


def _operands(layout: int, inputs: int, outputs: int, N: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Both factors and room for the product, laid out in memory as a linear layer has them in forward (0), in the
    gradient to its input (1), in the gradient to its weight (2)."""
    x, weight, y = (torch.randn(shape).to(dtype) for shape in ((N, inputs), (outputs, inputs), (N, outputs)))
    return ((x, weight.T, y), (y, weight, x), (y.T, x, weight))[layout]


def _matmul_s(a: Tensor, b: Tensor, out: Tensor) -> float:
    from argosy.matmul import MKL_IS_SLOW, dense

    began = time.perf_counter()
    if MKL_IS_SLOW:
        dense(a, b.mT)
    else:
        torch.mm(a, b, out=out)
    if out.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - began


def _check(setting: Setting, parameters: Iterable[torch.Tensor]) -> None:
    found = sum(parameter.numel() for parameter in parameters)
    assert found == setting.parameters(), f"{found:,} parameters are not the model's {setting.parameters():,}"


def main() -> None:
    name, setting = sys.argv[1], Setting(**json.loads(sys.argv[2]))
    torch.set_num_threads(setting.threads)
    torch.manual_seed(0)
    CONTENDERS[name](setting, Turns())


if __name__ == "__main__":
    main()
