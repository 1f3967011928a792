"""Export to a GGUF file, for llama.cpp and what stands on it: tensor by tensor, by the writer of the gguf package.

llama.cpp computes each architecture in one way, and a file says little beyond sizes. So a family has a row here with
all that its architecture implies; a model that differs is refused by the name of the setting, not written to compute
something else.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor

from argosy.config.attention import RopeScaling
from argosy.config.model import ModelConfig, repeated
from argosy.data.stores.model_folder import ByteSink, GgufType, new_folder
from argosy.errors import UserError, missing_extra
from argosy.models.gguf_tokenizer import add_tokenizer
from argosy.models.hf import folded_weight
from argosy.models.lazy_weights import LazyWeights
from argosy.models.rope import rotary_frequencies
from argosy.models.tensor_file import bytes_of
from argosy.plan.layer_spec import RopeSpec, layer_spec
from argosy.plan.parameters import shared_width, state_table

GGUF_BLOCK = 32
"""Numbers that share a scale in Q8_0 and Q4_0."""
GGUF_TENSORS = {
    "embedding": "TOKEN_EMBD",
    "norm": "OUTPUT_NORM",
    "head": "OUTPUT",
    "attention_norm": "ATTN_NORM",
    "attention_post_norm": "ATTN_POST_NORM",
    "attention.q": "ATTN_Q",
    "attention.k": "ATTN_K",
    "attention.v": "ATTN_V",
    "attention.o": "ATTN_OUT",
    "attention.q_norm": "ATTN_Q_NORM",
    "attention.k_norm": "ATTN_K_NORM",
    "mlp_norm": "FFN_NORM",
    "mlp_post_norm": "FFN_POST_NORM",
    "mlp.gate": "FFN_GATE",
    "mlp.up": "FFN_UP",
    "mlp.down": "FFN_DOWN",
    "mlp.router": "FFN_GATE_INP",
    "mlp.experts.gate": "FFN_GATE_EXP",
    "mlp.experts.up": "FFN_UP_EXP",
    "mlp.experts.down": "FFN_DOWN_EXP",
    "mlp.shared.gate": "FFN_GATE_SHEXP",
    "mlp.shared.up": "FFN_UP_SHEXP",
    "mlp.shared.down": "FFN_DOWN_SHEXP",
    "mlp.shared_gate": "FFN_GATE_INP_SHEXP",
}
"""Our module, of a block without its number -> the tensor's name in `gguf.MODEL_TENSOR`, whose table spells it."""
IN_FP32 = ("mlp.router", "mlp.shared_gate")
"""Matrices that stay in fp32, as norms and biases do: llama.cpp asks for it."""
AT_THE_ENDS = ("embedding", "head")
"""Matrices of which a 4-bit file keeps 8 bits: every token passes them."""

SIZES = (
    "preset", "weights", "family", "layers", "width", "heads", "kv_heads", "head_width", "ffn_width", "vocab_size",
    "max_seq_len", "rope_theta", "norm_eps", "tie_embeddings", "init_std", "mup.", "mtp.loss_weight", "moe.experts",
    "moe.experts_per_token", "moe.expert_ffn_width", "moe.balance", "moe.aux_coefficient", "moe.bias_rate",
    "moe.z_coefficient", "moe.capacity_factor",
)  # fmt: skip
"""Settings that a file says, or that only training knows: they differ from model to model."""
SCALED = ("rope_scaling.",)


@dataclass(frozen=True)
class Architecture:
    """An architecture of llama.cpp, as one of our families has it."""

    name: str
    """Name in `gguf.MODEL_ARCH`."""
    rotary: Literal["halves", "pairs"] = "halves"
    """pairs: llama.cpp turns numbers that lie side by side (LLAMA_ROPE_TYPE_NORM); we keep them in two halves."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Settings that it implies, beside the defaults of `ModelConfig`."""
    free: tuple[str, ...] = ()
    """Further settings that it takes; a name that ends in a dot is a whole table."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Names of tensors in addition to `GGUF_TENSORS`."""
    ties: bool = True
    """Without a head's tensor in the file it takes the embedding; false: it asks for one."""


LLAMA = Architecture("LLAMA", "pairs", free=(*SCALED, "attention_bias", "ffn_bias"))
QK_NORM = {"qk_norm": True}
GGUF_GEMMA = {"activation": "gelu_tanh", "norms.zero_centered": True}
GGUF_GEMMA2 = GGUF_GEMMA | {"norms.place": "around", "attention.layers": ("sliding", "full")}
GEMMA_FREE = ("embedding_scale", "attention.scale", "attention.window")
OLMO = QK_NORM | {"attention.norm_over": "all"}
ARCHITECTURES = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "mixtral": LLAMA,
    "qwen2": Architecture("QWEN2", fixed={"qkv_bias": True}, free=SCALED),
    "qwen2_moe": Architecture(
        "QWEN2MOE",
        fixed={"qkv_bias": True, "moe.shared_experts": 1, "moe.shared_gate": True, "moe.normalize_weights": False},
        free=(*SCALED, "moe.shared_ffn_width"),
        ties=False,
    ),
    "qwen3": Architecture("QWEN3", fixed=QK_NORM, free=SCALED),
    "qwen3_moe": Architecture("QWEN3MOE", fixed=QK_NORM, free=SCALED),
    "gemma": Architecture("GEMMA", fixed=GGUF_GEMMA, free=("embedding_scale",)),
    "gemma2": Architecture("GEMMA2", fixed=GGUF_GEMMA2, free=(*GEMMA_FREE, "attention.softcap", "logit_softcap")),
    "gemma3_text": Architecture(
        "GEMMA3",
        fixed=GGUF_GEMMA2
        | QK_NORM
        | {
            "attention.layers": ("sliding",) * 5 + ("full",),
            "attention.sliding_rope_theta": 10_000.0,
            "attention.sliding_rope_scaled": False,
        },
        free=(*GEMMA_FREE, *SCALED, "logit_softcap"),
    ),
    "olmo2": Architecture("OLMO2", fixed=OLMO | {"norms.place": "after"}, free=SCALED, ties=False),
    "olmoe": Architecture("OLMOE", fixed=OLMO | {"moe.normalize_weights": False}, free=SCALED, ties=False),
    "granite": Architecture(
        "GRANITE",
        "pairs",
        free=(*LLAMA.free, "embedding_scale", "residual_scale", "attention.scale", "logit_scale"),
    ),
    "smollm3": Architecture("SMOLLM3", "pairs", {"attention.rotary_layers": (True, True, True, False)}, SCALED),
    "seed_oss": Architecture("SEED_OSS", free=(*SCALED, "qkv_bias"), names={"mlp_norm": "ATTN_POST_NORM"}),
    "ernie4_5": Architecture("ERNIE4_5", "pairs", free=SCALED),
    "hunyuan_v1_dense": Architecture(
        "HUNYUAN_DENSE", fixed=QK_NORM | {"attention.norm_after_rotary": True}, free=SCALED
    ),
}
"""Our family -> llama.cpp's architecture. Each is held against llama.cpp's own logits by a test."""
DIVIDED = ("llama", "mistral", "mixtral", "granite")
"""Families whose architecture reads divisors of frequencies, by which Llama 3.1's stretching is written; others refuse
the file."""


def export_gguf(
    config: ModelConfig,
    weights: LazyWeights,
    out: str | Path,
    kind: GgufType = "bf16",
    *,
    name: str = "",
    tokenizer_dir: Path | None = None,
    eod_id: int | None = None,
    others: Mapping[str, bytes] = MappingProxyType({}),
) -> None:
    """Write the folder `out`, here or at a URL, with one GGUF file; whole or not at all.

    weights: by our names, read one by one. kind: the format of matrices; norms, biases and routers are in fp32.
    name: the model's name. tokenizer_dir: the folder with tokenizer.json and what goes with it; without one the file
    has no tokenizer. eod_id: the token that ends a document. others: further files, by name.

    Raises: UserError if llama.cpp would compute the model differently, has no name for its tokenizer, or `out` exists;
    StorageError if it cannot be written.
    """
    try:
        import gguf
    except ImportError:
        raise missing_extra("gguf", "gguf", "--format gguf") from None
    config = config.without_further()
    arch = _architecture(config)
    writer = gguf.GGUFWriter(None, gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH[arch.name]])
    _add_metadata(writer, config, arch, kind, name)
    add_tokenizer(writer, tokenizer_dir, config.vocab_size, eod_id)
    tensors = {_name_of(ours, arch): ours for ours in state_table(config)}
    formats = {theirs: _format(ours, weights.shape(ours), kind) for theirs, ours in tensors.items()}
    factors = _rotary_factors(config)
    if factors is not None:
        writer.add_tensor_info("rope_freqs.weight", factors.shape, factors.numpy().dtype, factors.nbytes)
    for theirs, ours in tensors.items():
        shape = weights.shape(ours)[1:] if _module(ours) == "mlp.shared_gate" else weights.shape(ours)
        block, block_bytes = gguf.GGML_QUANT_SIZES[formats[theirs]]
        size = math.prod(shape) // block * block_bytes
        writer.add_tensor_info(theirs, shape, torch.empty(0).numpy().dtype, size, formats[theirs])
    with new_folder(out) as folder:
        for file, data in others.items():
            with folder.file(file) as sink:
                sink.write(data)
        with folder.file(f"model-{kind.upper()}.gguf") as sink:
            _write(writer, sink, factors, weights, config, arch, tensors, formats)


def _write(
    writer: Any,
    sink: ByteSink,
    factors: Tensor | None,
    weights: LazyWeights,
    config: ModelConfig,
    arch: Architecture,
    tensors: Mapping[str, str],
    formats: Mapping[str, Any],
) -> None:
    from gguf.gguf_writer import WriterState

    file = _Counted(sink)
    writer.fout, writer.state = [file], WriterState.EMPTY
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.write_padding(file, file.tell())
    if factors is not None:
        file.write(bytes_of(factors))
        writer.write_padding(file, file.tell())
    for theirs, ours in tensors.items():
        for part in _parts(ours, weights, config, arch):
            file.write(_encoded(part, formats[theirs]))
        writer.write_padding(file, file.tell())


class _Counted:
    """Passes bytes on as the file that the package's writer expects."""

    def __init__(self, sink: ByteSink):
        self._sink, self._written = sink, 0

    def write(self, data: bytes | memoryview) -> None:
        self._sink.write(data)
        self._written += len(data)

    def tell(self) -> int:
        return self._written

    def flush(self) -> None:
        pass


def _parts(ours: str, weights: LazyWeights, config: ModelConfig, arch: Architecture) -> Iterator[Tensor]:
    """Yield the rows of a tensor as llama.cpp wants them, in fp32."""
    shift = float(config.norms.zero_centered and "norm" in ours)  # its converters add the one
    turned = arch.rotary == "pairs" and _module(ours) in ("attention.q", "attention.k")
    for part in [weights[ours]] if turned else weights.in_parts(ours):
        rows = folded_weight(ours, part, config, torch.float32) + shift
        yield _in_pairs(ours, rows, config) if turned else rows


def _in_pairs(ours: str, weight: Tensor, config: ModelConfig) -> Tensor:
    """Return rows of queries or keys with those that turn together side by side."""
    spec = layer_spec(config, int(ours.split(".")[1]))
    heads = spec.heads if _module(ours) == "attention.q" else spec.kv_heads
    by_head = weight.unflatten(0, (heads, 2, spec.head_width // 2))
    return by_head.transpose(1, 2).reshape(weight.shape)


def _encoded(part: Tensor, kind: Any) -> memoryview:
    from gguf.quants import quantize

    numbers: Any = quantize(part.contiguous().numpy(), kind)
    return memoryview(numbers).cast("B")


def _format(ours: str, shape: Sequence[int], kind: GgufType) -> Any:
    """Return the format of a tensor, a `gguf.GGMLQuantizationType`."""
    from gguf import GGMLQuantizationType as Types

    if len(shape) < 2 or "norm" in ours or _module(ours) in IN_FP32:
        return Types.F32
    if kind in ("q8_0", "q4_0") and shape[-1] % GGUF_BLOCK:  # llama.cpp's own tools fall back so too
        return Types.F16
    return Types.Q8_0 if kind == "q4_0" and _module(ours) in AT_THE_ENDS else Types[kind.upper()]


def _module(ours: str) -> str:
    """Return the module of a weight, of a block without its number."""
    parts = ours.split(".")[2:] if ours.startswith("blocks.") else ours.split(".")
    return ".".join(parts[:-1] if parts[-1] in ("weight", "bias") else parts)


def _name_of(ours: str, arch: Architecture) -> str:
    import gguf

    found = {**GGUF_TENSORS, **arch.names}.get(_module(ours))
    known = {gguf.TENSOR_NAMES[tensor] for tensor in gguf.MODEL_TENSORS[gguf.MODEL_ARCH[arch.name]]}
    pattern = gguf.TENSOR_NAMES[gguf.MODEL_TENSOR[found]] if found is not None else ""
    if pattern not in known:
        raise UserError(
            f"{ours}: llama.cpp's architecture {arch.name.lower()} has no such tensor. Export with --format "
            "safetensors."
        )
    number = ours.split(".")[1] if ours.startswith("blocks.") else ""
    return f"{pattern.format(bid=number)}.{'bias' if ours.endswith('bias') else 'weight'}"


# What the architecture implies


def _architecture(config: ModelConfig) -> Architecture:
    """Return the architecture of a model. Raises: UserError if llama.cpp has none that computes it."""
    arch = ARCHITECTURES.get(config.family)
    if arch is None:
        raise UserError(
            f"model.family = {config.family}: --format gguf knows {', '.join(ARCHITECTURES)}. Export with --format "
            "safetensors."
        )
    implied = _flat(ModelConfig()) | dict(arch.fixed)
    free = (*SIZES, *arch.free)
    ours = _flat(config)
    ours["attention.layers"], ours["attention.window"] = _layers(config, implied["attention.layers"])
    for key, value in ours.items():
        if value != implied[key] and not any(key == f or (f.endswith(".") and key.startswith(f)) for f in free):
            _refuse(config, key, value, f"computes with {implied[key] or 'none'}")
    if config.tie_embeddings and not arch.ties:
        _refuse(config, "tie_embeddings", True, "wants a head of its own")
    _check_numbers(config)
    return arch


def _flat(config: ModelConfig) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in config.model_dump().items():
        values |= {f"{key}.{k}": v for k, v in value.items()} if isinstance(value, dict) else {key: value}
    return values


def _layers(config: ModelConfig, implied: tuple[str, ...]) -> tuple[tuple[str, ...], int]:
    """Return the cycle of layers' kinds and the window as they are compared: a window that nothing reaches is none."""
    attention = config.attention
    if not implied:
        return ((), 0) if attention.window >= config.max_seq_len else (attention.layers, attention.window)
    same = all(repeated(attention.layers, i, "full") == repeated(implied, i, "full") for i in range(config.layers))
    return (implied if same else attention.layers), attention.window


def _check_numbers(config: ModelConfig) -> None:
    """Raise UserError for numbers that llama.cpp computes itself, and would differently."""
    if config.moe.experts and (config.moe.first_dense_layers or config.moe.dense_layers or config.moe.every > 1):
        _refuse(config, "moe.dense_layers", config.moe.dense_layers, "has experts in every layer")
    if config.moe.experts and config.moe.balance == "bias":
        _refuse(config, "moe.balance", config.moe.balance, "adds no biases to the scores that choose experts")
    if config.family == "olmoe" and config.kv_heads != config.heads:
        _refuse(config, "kv_heads", config.kv_heads, "has as many keys as queries")
    if config.family.startswith("gemma"):
        _check_near(config, "embedding_scale", config.embedding_scale, config.width**0.5)
        if config.family != "gemma":
            is_27b = config.layers == {"gemma2": 46}.get(config.family, 62)  # as llama.cpp knows that model
            scaled = config.width / config.heads if is_27b else config.head_width
            _check_near(config, "attention.scale", config.attention.scale or config.head_width**-0.5, scaled**-0.5)
    scaling = config.rope_scaling
    usual = (scaling.beta_fast, scaling.beta_slow, scaling.truncate) == (32.0, 1.0, True)
    if scaling.kind == "yarn" and not (usual and scaling.attention_factor in (0, 0.1 * math.log(scaling.factor) + 1)):
        _refuse(config, "rope_scaling", "yarn with other constants", "stretches by the paper's")
    if scaling.kind in ("longrope", "proportional") or (scaling.kind == "llama3" and config.family not in DIVIDED):
        _refuse(config, "rope_scaling.kind", scaling.kind, "is written with none, linear and yarn, some with llama3")


def _check_near(config: ModelConfig, key: str, value: float, implied: float) -> None:
    if not math.isclose(value, implied, rel_tol=1e-4):
        _refuse(config, key, value, f"computes with {implied:.6g}")


def _refuse(config: ModelConfig, key: str, value: object, why: str) -> None:
    raise UserError(
        f"model.{key} = {value}: llama.cpp's architecture for {config.family} {why}. Export with --format safetensors."
    )


# Metadata


def _add_metadata(writer: Any, config: ModelConfig, arch: Architecture, kind: GgufType, name: str) -> None:
    import gguf

    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(name or config.family)
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{kind.upper()}"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_seq_len)
    writer.add_embedding_length(config.width)
    writer.add_block_count(config.layers)
    writer.add_feed_forward_length(config.ffn_width)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_key_length(config.head_width)
    writer.add_value_length(config.head_width)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_rope_dimension_count(config.attention.rotary_width or config.head_width)
    scaling = config.rope_scaling
    if scaling.kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaling.kind))
        writer.add_rope_scaling_factor(scaling.factor)
    if scaling.kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(scaling.original_max_seq_len)
    if config.moe.experts:
        writer.add_expert_count(config.moe.experts)
        writer.add_expert_used_count(config.moe.experts_per_token)
        writer.add_expert_feed_forward_length(config.moe.expert_ffn_width)
        if config.moe.shared_experts:
            writer.add_expert_shared_feed_forward_length(shared_width(config))
    if arch.fixed.get("attention.layers"):
        writer.add_sliding_window(config.attention.window)
    if config.attention.softcap:
        writer.add_attn_logit_softcapping(config.attention.softcap)
    if config.logit_softcap:
        writer.add_final_logit_softcapping(config.logit_softcap)
    if config.family == "granite":
        writer.add_embedding_scale(config.embedding_scale)
        writer.add_residual_scale(config.residual_scale)
        writer.add_attention_scale(config.attention.scale or config.head_width**-0.5)
        writer.add_logit_scale(1 / config.logit_scale)  # it divides by it


def _rotary_factors(config: ModelConfig) -> Tensor | None:
    """Return what llama.cpp divides each frequency by where Llama 3.1's stretching is meant, [head_width / 2]."""
    if config.rope_scaling.kind != "llama3":
        return None
    rope = layer_spec(config, 0).places
    assert isinstance(rope, RopeSpec)
    return rotary_frequencies(replace(rope, scaling=RopeScaling())) / rotary_frequencies(rope)
