"""An adapter trains as in PEFT, however the model is laid out; what is beside it stays, and no checkpoint holds it."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch

from argosy import compiler
from argosy.config.dump import save_run
from argosy.config.schema import RunConfig
from argosy.errors import UserError
from argosy.inference.evaluate import evaluate
from argosy.inference.huggingface import adapters_in, export_adapter, import_adapter, merge_checkpoint
from argosy.inference.trained_model import open_checkpoint
from argosy.launch.resolve import check_parameters
from argosy.models import hf, peft_adapter
from argosy.models.dropout import is_kept, mask_keys, mask_keys_of_layer, salt_of
from argosy.models.microbatch import microbatches, with_mask_keys
from argosy.models.quantised_weight import QuantisationScheme
from argosy.parallel.apply import apply, lay_out
from argosy.parallel.recompute import RecomputeMode
from argosy.parallel.world import World
from argosy.plan.parameters import adapter_of, parameter_table
from argosy.plan.plan import Plan
from tiny import MODEL, decoder, eager, losses, made_step, run_config, train_in, train_step, whole_parameters
from workers import WorkerPool

STEPS, LR, EPS = 5, 2e-3, 1e-5
TEMPORARY = TemporaryDirectory()
ROWS = np.random.default_rng(0).integers(1, 400, (8, 33)).astype(np.int32)
EXPERTS = {"family": "mixtral", "ffn_width": 16, "moe": {"experts": 4, "expert_ffn_width": 16, "aux_coefficient": 0.0}}
DELTA = {
    "family": "qwen3_5_text", "layers": 2, "qk_norm": True, "norms": {"zero_centered": True},
    "attention": {"layers": ["linear", "full"], "gate": True, "rotary_width": 2},
    "delta_net": {"key_heads": 2, "value_heads": 4, "key_width": 8, "value_width": 6},
}  # fmt: skip
LATENT = {
    "family": "deepseek_v3", "layers": 2, "kv_heads": 4,
    "mla": {"kv_rank": 16, "q_rank": 24, "rope_width": 8, "nope_width": 16, "value_width": 16},
    "moe": {
        "experts": 4, "expert_ffn_width": 16, "shared_experts": 1, "first_dense_layers": 1, "router": "sigmoid",
        "aux_coefficient": 0.0,
    },
    "mtp": {"modules": 1},
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "lora": {"rank": 4},
    "rslora": {"rank": 4, "kind": "rslora", "alpha": 8.0, "targets": ("attention.*", "blocks.1.mlp.down")},
    "dora": {"rank": 4, "kind": "dora"},
    "dropout": {"rank": 4, "dropout": 0.25},
    "dora dropout": {"rank": 4, "kind": "dora", "dropout": 0.25},
    # PEFT has one inner matrix for the gates and the other inputs of experts, which it keeps in one tensor.
    "experts": {"rank": 4, "targets": ("q", "o", "experts.down")},
    # Those that the class does not store in one tensor with others.
    "delta": {"rank": 4, "dropout": 0.25, "targets": ("out", "gate_in", "beta_in", "decay_in", "v", "o", "down")},
    "latent": {"rank": 4, "dropout": 0.25, "targets": ("attention.*", "shared.*", "mlp.down", "projection")},
}
QUANTISED = {
    "nf4": {"rank": 4, "base": "nf4"},
    "int8": {"rank": 4, "base": "int8", "kind": "dora"},
    "nf4 experts": {"rank": 4, "base": "nf4", "targets": ("q", "o", "experts.down")},
}
CASES |= QUANTISED
# Tensor parallelism over two ranks cuts between blocks of 64 numbers.
WIDE = {"layers": 2, "width": 128, "head_width": 32, "ffn_width": 128}
MODELS = {
    "experts": EXPERTS,
    "delta": DELTA,
    "latent": LATENT,
    "nf4": WIDE,
    "int8": WIDE,
    "nf4 experts": {**EXPERTS, "width": 128},
}


def sections(case: str) -> dict[str, dict[str, Any]]:
    model = MODELS.get(case, {"layers": 2})
    return {"model": model, "lora": CASES[case], "optimizer": {"lr": LR, "weight_decay": 0.0, "eps": EPS}}


def trained(world: World, plan: str, case: str) -> tuple[list[float], dict[str, np.ndarray]]:
    """Loss and norm of each step on ROWS, and this rank's whole parameters after them."""
    layout, said = eager(plan), []
    step = train_step(world, layout, **sections(case))
    model = step.state.model
    rows, run = ROWS[layout.rows_of(model.dp_rank, len(ROWS))], run_config(Path("no data"), **sections(case))
    for number in range(STEPS):
        micros = microbatches(rows, layout.microbatch, 0, world.device)
        micros = with_mask_keys(micros, run, number, layout.rows_of(model.dp_rank, len(ROWS)).start)
        said += made_step(step, micros, LR)
    return said, whole_parameters(model)


def as_quantised(run: RunConfig, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights with the numbers that the quantised ones stand for."""
    found = dict(weights)
    for name, parameter in parameter_table(run.model).items():
        if parameter.is_linear:
            scheme = QuantisationScheme(run.lora, parameter.shape[-1], 0, parameter.shape[-1])
            scheme.to(torch.device("cpu"))
            found[name] = scheme.dequantise(scheme.quantise(weights[name]), torch.float32)
    return found


class Draw(torch.nn.Module):
    """PEFT's dropout with the masks of ours, which no other library draws."""

    keys: torch.Tensor

    def __init__(self, adapter: str, dropout: float):
        super().__init__()
        _, layer, place = adapter.split(".", 2)
        self.layer, self.salt, self.dropout = int(layer), salt_of(place), dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        keys = mask_keys_of_layer(self.keys, self.layer)
        return x * is_kept(keys, self.salt, range(x.shape[-1]), self.dropout) / (1 - self.dropout)


def put_masks_into(theirs: torch.nn.Module, run: RunConfig) -> list[Draw]:
    """Put our masks in place of PEFT's dropouts, and return them."""
    modules, found = dict(theirs.named_modules()), list[Draw]()
    for module in peft_adapter.peft_modules(run.model) if run.lora.dropout else ():
        dropouts = modules.get(f"{peft_adapter.PEFT_PREFIX}{module.name}.lora_dropout")
        if dropouts is not None:
            dropouts["default"] = Draw(adapter_of(module.ours[0]), run.lora.dropout)
            found.append(dropouts["default"])
    return found


@cache
def of_peft(case: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The same by PEFT, from the same start, which it reads from a folder of ours; its end we read from one of its."""
    from peft import PeftModel  # here, as ranks import this module

    from transformers_models import load_theirs

    run = run_config(Path("no data"), **sections(case))
    start = apply(Plan(compile=False, microbatch=8), run, World())
    adapter = {piece.name: piece.value for piece in start.pieces}
    base = decoder(**sections(case)["model"])
    if run.lora.is_quantised:
        base.load_state_dict(as_quantised(run, base.state_dict()))
    folder = Path(TEMPORARY.name) / case
    hf.export_folder(run.model, base.state_dict(), folder / "base", dtype=torch.float32)
    peft_adapter.export_adapter(run.model, run.lora, adapter, base.state_dict(), folder / "adapter")
    theirs = PeftModel.from_pretrained(load_theirs(folder / "base"), folder / "adapter", is_trainable=True)
    left = [parameter for parameter in theirs.parameters() if parameter.requires_grad]
    assert sum(parameter.numel() for parameter in left) == sum(tensor.numel() for tensor in adapter.values())
    adam = torch.optim.AdamW(left, lr=LR, betas=(0.9, 0.95), eps=EPS, weight_decay=0.0)
    tokens, said = torch.from_numpy(ROWS.astype(np.int64)), []
    draws = put_masks_into(theirs, run)
    for number in range(STEPS):
        for draw in draws:
            draw.keys = mask_keys(run.seed, number, 0, *tokens[:, :-1].shape)
        logits = theirs(tokens[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(left, 1.0)
        adam.step()
        adam.zero_grad()
        said += [loss.item(), norm.item()]
    if "experts" in case:  # PEFT saves those that transformers 5 has fused under other names
        return said, {}
    theirs.save_pretrained(folder / "trained")
    lora, tensors = peft_adapter.import_adapter(folder / "trained", run.model, base.state_dict())
    assert (lora.scale, lora.dropout) == (run.lora.scale, run.lora.dropout)
    return said, tensors


QUICK = [
    ("lora", "dp_shard=2,zero=3"),
    ("rslora", "microbatch=8"),
    ("dropout", "pp=2,recompute=full"),
    ("dora dropout", "tp=2"),
    ("experts", "ep=2,dp_shard=2"),
    ("nf4", "microbatch=4,recompute=full"),
]
SLOW = [
    ("dropout", "cp=2"),
    ("delta", "tp=2"),
    ("int8", "tp=2"),
    ("nf4 experts", "ep=2,dp_shard=2,zero=3"),
    ("lora", "microbatch=8"),
    ("rslora", "tp=2"),
    ("dora", "dp_shard=2,zero=3"),
    ("lora", "tp=2"),
    ("lora", "pp=2"),
    ("lora", "cp=2"),
    ("dora", "tp=2,microbatch=4"),
    ("dropout", "microbatch=8"),
    ("dropout", "tp=2,microbatch=4"),
    ("dropout", "dp_shard=2,zero=3"),
    ("delta", "cp=2,recompute=selective"),
    ("nf4", "tp=2,recompute=selective"),
    ("nf4", "pp=2"),
    ("nf4", "dp_shard=2,zero=3"),
]


@pytest.mark.parametrize(
    ("case", "plan"), [*QUICK, *(pytest.param(*row, marks=pytest.mark.slow) for row in SLOW)], ids=str
)
def test_an_adapter_trains_as_in_peft(workers: WorkerPool, case: str, plan: str) -> None:
    first = decoder(**sections(case)["model"]).state_dict()
    for said, parts in workers.run(eager(plan).world_size, trained, plan, case):
        theirs, trained_there = of_peft(case)
        assert said == pytest.approx(theirs, rel=1e-5)
        for name in trained_there.keys() & parts.keys():
            torch.testing.assert_close(torch.from_numpy(parts[name]), trained_there[name], rtol=1e-3, atol=1e-5)
        assert not trained_there or first.keys() | trained_there.keys() >= parts.keys()
        plain = {name for name in first.keys() & parts.keys() if parts[name].dtype != np.uint8}
        assert all(torch.equal(torch.from_numpy(parts[name]), first[name]) for name in plain)
        assert (plain < first.keys()) == (case in QUANTISED or "pp" in plan)


@pytest.mark.parametrize("plan", [pytest.param("tp=2", marks=pytest.mark.slow), "pp=2,recompute=full,microbatch=2"])
def test_latent_attention_and_further_tokens_drop_what_one_process_drops(workers: WorkerPool, plan: str) -> None:
    alone, _ = trained(World(), "microbatch=8", "latent")
    for said, _ in workers.run(2, trained, plan, "latent"):
        assert said == pytest.approx(alone, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["none", "full"])
def test_compiled_blocks_drop_the_same_and_are_whole(mode: RecomputeMode) -> None:
    run, found = run_config(Path("no data"), **sections("dropout")), []
    for is_compiled in (False, True):
        _, parts = lay_out(Plan(compile=False, recompute=mode), run, World())
        (micro,) = with_mask_keys(microbatches(ROWS[:2], 2, 0, torch.device("cpu")), run, 0, 0)
        adapter = {name: p for name, p in parts[0].named_parameters() if p.requires_grad}
        for name, parameter in adapter.items():
            if name.endswith(".b"):
                torch.nn.init.ones_(parameter)
        if is_compiled:
            compiler.load()
            parts[0].blocks["1"].compile(backend="aot_eager", fullgraph=True)
        text = (micro.tokens_BT, micro.targets_BT, micro.positions_BT, micro.documents)
        loss = parts[0](*text, mask_keys_BT=micro.mask_keys_BT)
        loss.backward()
        found.append([loss, *(parameter.grad for parameter in adapter.values())])
    torch.testing.assert_close(*found)


def test_a_stopped_run_goes_on_bit_for_bit(workers: WorkerPool, corpus: Path, tmp_path: Path) -> None:
    base = run_config(corpus, train={"steps": 2}, evaluate={"every_steps": 0}, checkpoint={"every_steps": 1})
    train_in(World(), base, eager("microbatch=8"), tmp_path / "base")
    beside = {"weights": tmp_path / "base" / "checkpoints" / "step-00000001"}
    run = run_config(
        corpus,
        model={**MODEL, **beside},
        lora={"rank": 4, "kind": "dora", "dropout": 0.1},
        train={"steps": 4},
        checkpoint={"every_steps": 2},
    )
    whole, *_ = workers.run(2, train_in, run, eager("dp_shard=2,zero=1"), tmp_path / "whole")
    workers.run(2, train_in, run, eager("dp_shard=2,zero=1"), tmp_path / "stopped", 3)
    again, *_ = workers.run(2, train_in, run, eager("dp_shard=2,zero=1"), tmp_path / "stopped")
    assert losses(again) == losses(whole)
    files = [
        {path.name: path.read_bytes() for path in (tmp_path / kind).glob("checkpoints/step-*4/rank-*.safetensors")}
        for kind in ("whole", "stopped")
    ]
    assert files[0] == files[1]
    assert not any(b"attention.q.weight" in file for file in files[0].values())

    other, *_ = workers.run(2, train_in, run, eager("tp=2"), tmp_path / "stopped")  # nothing is left to do
    assert losses(other) == losses(whole)
    save_run(run, tmp_path / "whole" / "run.toml")
    shutil.copyfile(corpus / "tokenizer.json", tmp_path / "whole" / "tokenizer.json")
    validated = [record["validation_loss"] for record in whole if "validation_loss" in record]
    assert evaluate(tmp_path / "whole", max_tokens=500).loss == pytest.approx(validated[-1], rel=1e-5)

    merge_checkpoint(tmp_path / "whole", tmp_path / "merged")
    assert evaluate(tmp_path / "merged", corpus, max_tokens=500).loss == pytest.approx(validated[-1], rel=1e-5)
    save_run(base, tmp_path / "base" / "run.toml")
    export_adapter(tmp_path / "whole", tmp_path / "peft")
    described = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert (described["base_model_name_or_path"], described["revision"]) == (str(beside["weights"]), None)
    import_adapter(tmp_path / "peft", beside["weights"], tmp_path / "again")
    first, second = (open_checkpoint(tmp_path / name).model().state_dict() for name in ("merged", "again"))
    for name, tensor in first.items():
        torch.testing.assert_close(second[name], tensor, rtol=1e-5, atol=1e-6)
    assert [(a.run_dir.name, a.lora.rank, a.step) for a in adapters_in(tmp_path)] == [("again", 4, 0), ("whole", 4, 4)]
    with pytest.raises(UserError, match="has no adapter"):
        merge_checkpoint(tmp_path / "merged", tmp_path / "twice")


def test_other_weights_are_refused(corpus: Path, tmp_path: Path) -> None:
    base = run_config(corpus, train={"steps": 2}, evaluate={"every_steps": 0})
    for seed in range(2):
        train_in(World(), base.model_copy(update={"seed": seed}), eager("microbatch=8"), tmp_path / str(seed))
    run = run_config(corpus, model={**MODEL, "weights": tmp_path / "0"}, lora={"rank": 2}, train={"steps": 2})
    train_in(World(), run, eager("microbatch=8"), tmp_path / "run")
    model = run.model.model_copy(update={"weights": tmp_path / "1"})
    with pytest.raises(UserError, match="trained beside other weights"):
        train_in(World(), run.model_copy(update={"model": model}), eager("microbatch=8"), tmp_path / "run")
    beside_adapter = run.model.model_copy(update={"weights": tmp_path / "run"})
    with pytest.raises(UserError, match="holds an adapter alone"):
        train_in(World(), run.model_copy(update={"model": beside_adapter}), eager("microbatch=8"), tmp_path / "second")


def test_weights_may_lie_in_a_hugging_face_folder(corpus: Path, tmp_path: Path) -> None:
    for seed in range(2):
        model = decoder(seed)
        hf.export_folder(model.config, model.state_dict(), tmp_path / f"hf{seed}", dtype=torch.bfloat16)
    keys = {"model": {**MODEL, "weights": tmp_path / "hf0"}, "lora": {"rank": 4}, "checkpoint": {"every_steps": 4}}
    run = run_config(corpus, **keys)
    whole = train_in(World(), run, eager("microbatch=8"), tmp_path / "run", 4)
    again = train_in(World(), run, eager("microbatch=8"), tmp_path / "run")
    save_run(run, tmp_path / "run" / "run.toml")
    shutil.copyfile(corpus / "tokenizer.json", tmp_path / "run" / "tokenizer.json")
    validated = [record["validation_loss"] for record in again if "validation_loss" in record]
    assert losses(whole) == losses(again)[:4]
    assert evaluate(tmp_path / "run", max_tokens=500).loss == pytest.approx(validated[-1], rel=1e-5)
    export_adapter(tmp_path / "run", tmp_path / "peft")
    import_adapter(tmp_path / "peft", tmp_path / "hf0", tmp_path / "again")
    first, second = (open_checkpoint(tmp_path / name).model().state_dict() for name in ("run", "again"))
    assert all(torch.equal(second[name], tensor) for name, tensor in first.items())
    other = run_config(corpus, **{**keys, "model": {**MODEL, "weights": tmp_path / "hf1"}})
    with pytest.raises(UserError, match="hf1: the adapter was trained beside other weights"):
        train_in(World(), other, eager("microbatch=8"), tmp_path / "run")


def test_quantised_weights_are_read_anew_and_merges_have_the_first(
    workers: WorkerPool, corpus: Path, tmp_path: Path
) -> None:
    model = decoder()
    hf.export_folder(model.config, model.state_dict(), tmp_path / "hf", dtype=torch.bfloat16)
    keys = {"model": {**MODEL, "weights": tmp_path / "hf"}, "train": {"steps": 4}, "checkpoint": {"every_steps": 2}}
    run, plan = run_config(corpus, **keys, lora={"rank": 4, "base": "nf4"}), eager("dp_shard=2,zero=3,precision=bf16")
    whole, *_ = workers.run(2, train_in, run, plan, tmp_path / "whole")
    workers.run(2, train_in, run, plan, tmp_path / "run", 3)
    again, *_ = workers.run(2, train_in, run, plan, tmp_path / "run")
    assert losses(again) == losses(whole)
    files = list((tmp_path / "run").glob("checkpoints/step-*4/rank-*.safetensors"))
    assert files and not any(b"attention.q.weight" in file.read_bytes() for file in files)

    save_run(run, tmp_path / "run" / "run.toml")
    shutil.copyfile(corpus / "tokenizer.json", tmp_path / "run" / "tokenizer.json")
    export_adapter(tmp_path / "run", tmp_path / "peft")
    import_adapter(tmp_path / "peft", tmp_path / "hf", tmp_path / "plain")
    assert not open_checkpoint(tmp_path / "plain").run.lora.is_quantised
    first, second = (open_checkpoint(tmp_path / name).model().state_dict() for name in ("run", "plain"))
    assert all(torch.equal(second[name], tensor) for name, tensor in first.items())


def test_quantised_weights_of_a_run_are_the_same_on_every_mesh(
    workers: WorkerPool, corpus: Path, tmp_path: Path
) -> None:
    model = {**MODEL, **WIDE}
    base = run_config(corpus, model=model, train={"steps": 1}, evaluate={"every_steps": 0})
    train_in(World(), base, eager("microbatch=8"), tmp_path / "base")
    run = run_config(
        corpus, model={**model, "weights": tmp_path / "base"}, lora={"rank": 4, "base": "nf4"}, train={"steps": 3}
    )
    alone = train_in(World(), run, eager("microbatch=8"), tmp_path / "alone")
    for plan in ("tp=2", "pp=2"):
        others, *_ = workers.run(2, train_in, run, eager(plan), tmp_path / plan)
        assert losses(others) == pytest.approx(losses(alone), rel=1e-6)


def test_an_adapter_of_another_shape_or_target_is_refused(corpus: Path, tmp_path: Path) -> None:
    run = run_config(corpus, lora={"rank": 2}, train={"steps": 2}, evaluate={"every_steps": 0})
    train_in(World(), run, eager("microbatch=8"), tmp_path)
    for lora in ({"rank": 4}, {"rank": 2, "kind": "dora"}):
        other = run.model_copy(update={"lora": run.lora.model_copy(update=lora)})
        with pytest.raises(UserError, match=r"is of another model: .*lora"):
            train_in(World(), other, eager("microbatch=8"), tmp_path)
    wrong = run.model_copy(update={"lora": run.lora.model_copy(update={"targets": ("q", "atention.k")})})
    with pytest.raises(UserError, match=r'lora.targets: "atention.k" matches no linear layer.*attention.k'):
        check_parameters(wrong)
    wrong = run.model_copy(update={"lora": run.lora.model_copy(update={"targets": ('["nothing_proj"]',)})})
    with pytest.raises(UserError, match=r"matches no linear layer"):
        check_parameters(wrong)
    for frozen, lora in (("*", {}), ("blocks.0", {"rank": 2, "targets": ("blocks.0.*",)})):
        with pytest.raises(UserError, match=r"train.frozen matches every parameter that would be trained"):
            check_parameters(run_config(corpus, train={"frozen": (frozen,)}, lora=lora))
    with pytest.raises(UserError, match=r"lora.dropout = 0.1: lora.targets has experts \(blocks.0.mlp.experts.down"):
        check_parameters(run_config(corpus, model=EXPERTS, lora={**CASES["experts"], "dropout": 0.1}))


@pytest.mark.parametrize(
    ("lora", "words"),
    [({"base": "nf4"}, "weights that are trained are not quantised"), ({"rank": 4, "base": "int4"}, "'nf4' or 'int8'")],
)
def test_a_base_that_cannot_be_is_refused(lora: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        run_config(Path("no data"), lora=lora)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"lora_dropout": 1.0}, "lora_dropout = 1.0: it must be a number from 0 to below 1"),
        ({"lora_dropout": "0.1"}, "lora_dropout = '0.1': it must be"),
        ({"r": 0}, "r = 0, lora_alpha = 8: both must be positive"),
        ({"use_dora": True, "use_rslora": True}, "go one at a time"),
        ({"init_lora_weights": "pissa_niter_4"}, "belongs to weights that this has changed"),
    ],
)
def test_settings_of_peft_that_cannot_be_are_refused(tmp_path: Path, said: dict[str, Any], words: str) -> None:
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, **said}
    (tmp_path / peft_adapter.ADAPTER_CONFIG).write_text(json.dumps(settings))
    (tmp_path / peft_adapter.ADAPTER_TENSORS).touch()
    with pytest.raises(UserError, match=words):
        peft_adapter.import_adapter(tmp_path, decoder().config, {})
