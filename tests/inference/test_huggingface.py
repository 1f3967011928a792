"""Weights between run folders and Hugging Face folders."""

from __future__ import annotations

import json
import re
import resource
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers

from argosy.checkpoint import store
from argosy.config.data import DataStage
from argosy.config.dump import save_run
from argosy.config.load import load
from argosy.config.train import LoraConfig
from argosy.data.chat_template import CHATML
from argosy.errors import StorageError, UserError
from argosy.inference.huggingface import export_checkpoint, hub_name, import_adapter, import_checkpoint
from argosy.inference.loaded_model import generate
from argosy.inference.trained_model import open_checkpoint
from argosy.launch.run_folder import write
from argosy.models import hf
from argosy.models.hf import import_folder
from argosy.models.peft_adapter import export_adapter
from argosy.plan.plan import Plan
from tiny import decoder
from transformers_models import ORIGINAL, SIZES, THEIRS, load_theirs, random_theirs

TOKENS = torch.randint(0, 400, (2, 16), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def exported(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("huggingface") / "model"
    export_checkpoint(str(trained), str(out))
    return out


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Files of this process end at 4 KiB: the kernel refuses more, as a full disk does."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # of modules that are first imported now, half would be left
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.usefixtures("full_disk")
@pytest.mark.parametrize("kind", ["safetensors", "gguf", "int8", "import"])
def test_a_full_disk_is_a_message_and_leaves_nothing(kind, trained, exported, tmp_path):
    with pytest.raises(StorageError, match=r"out could not be written \(.*Free some space"):
        if kind == "import":
            import_checkpoint(exported, tmp_path / "out")
        else:
            export_checkpoint(trained, tmp_path / "out", format=kind)
    assert not list(tmp_path.iterdir())


@torch.no_grad()
def logits(run_dir: Path) -> torch.Tensor:
    return open_checkpoint(run_dir).model()(TOKENS)


def test_there_and_back_the_model_computes_the_same(trained, exported, tmp_path):
    import_checkpoint(str(exported), str(tmp_path / "back"))
    assert torch.equal(logits(tmp_path / "back"), logits(trained))
    assert generate(tmp_path / "back", "def ") == generate(trained, "def ")


@pytest.mark.parametrize("name", THEIRS)
@torch.no_grad()
def test_what_was_imported_and_exported_is_the_model_that_transformers_saved(name, tmp_path):
    theirs, saved, run_dir, exported = random_theirs(name), tmp_path / "saved", tmp_path / "run", tmp_path / "exported"
    theirs.save_pretrained(saved)
    import_checkpoint(saved, run_dir)
    export_checkpoint(run_dir, exported)
    before, after = (load_file(folder / "model.safetensors") for folder in (saved, exported))
    assert before.keys() == after.keys() and all(torch.equal(after[weight], before[weight]) for weight in before)
    tokens_BT = torch.randint(SIZES["vocab_size"], (2, 3 * ORIGINAL), generator=torch.Generator().manual_seed(1))
    assert torch.equal(load_theirs(exported)(tokens_BT).logits, theirs(tokens_BT).logits)
    import_checkpoint(exported, tmp_path / "again")
    first, second = (open_checkpoint(folder) for folder in (run_dir, tmp_path / "again"))
    assert first.run.model == second.run.model
    torch.testing.assert_close(second.model().state_dict(), first.model().state_dict(), rtol=0, atol=0)


def test_what_was_imported_is_a_whole_checkpoint_of_weights_only(exported, tmp_path):
    import_checkpoint(exported, tmp_path / "back")
    checkpoint = store.newest_whole(tmp_path / "back").checkpoint
    assert (checkpoint.step, checkpoint.manifest.has_optimizer) == (0, False)
    assert {path.name for path in tmp_path.iterdir()} == {"back"}


def adapter_of_queries(inputs: int, outputs: int, fill: float = 0.0) -> dict[str, torch.Tensor]:
    sizes = {"a": (2, inputs), "b": (outputs, 2)}
    return {f"blocks.0.attention.q.lora.{part}": torch.full(size, fill) for part, size in sizes.items()}


def test_an_adapter_beside_bf16_is_merged_in_the_precision_of_the_export(trained, tmp_path):
    export_checkpoint(trained, tmp_path / "half", "bf16")
    config, weights = import_folder(tmp_path / "half")
    adapter = adapter_of_queries(*reversed(weights.shape("blocks.0.attention.q.weight")), fill=0.01)
    export_adapter(config, LoraConfig(rank=2), adapter, weights, tmp_path / "peft")
    import_adapter(tmp_path / "peft", tmp_path / "half", tmp_path / "run")
    export_checkpoint(tmp_path / "run", tmp_path / "whole", "fp32")
    import_checkpoint(tmp_path / "whole", tmp_path / "back")
    assert torch.equal(logits(tmp_path / "back"), logits(tmp_path / "run"))


def test_an_adapter_and_the_weights_beside_it_may_be_at_urls(trained, exported, tmp_path):
    config, weights = import_folder(exported)
    outputs, inputs = weights.shape("blocks.0.attention.q.weight")
    export_adapter(config, LoraConfig(rank=2), adapter_of_queries(inputs, outputs), weights, tmp_path / "peft")
    with pytest.raises(UserError, match=r"config\.json is not there\. An adapter alone is: .* --base WEIGHTS"):
        import_checkpoint(tmp_path / "peft", tmp_path / "run")
    import_adapter(f"file://{tmp_path / 'peft'}", Path(f"file://{exported}"), tmp_path / "run")
    assert torch.equal(logits(tmp_path / "run"), logits(trained))


def test_half_precision_is_near(trained, tmp_path):
    export_checkpoint(trained, tmp_path / "half", "bf16")
    import_checkpoint(tmp_path / "half", tmp_path / "back")
    torch.testing.assert_close(logits(tmp_path / "back"), logits(trained), rtol=0.05, atol=0.05)


def test_nothing_is_written_over(trained, exported, tmp_path):
    with pytest.raises(UserError, match="exists"):
        export_checkpoint(trained, exported)
    with pytest.raises(UserError, match="exists already"):
        import_checkpoint(exported, tmp_path)


def test_a_folder_that_is_no_model_leaves_nothing_behind(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError):
        import_checkpoint(tmp_path / "empty", tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"empty"}


@pytest.mark.parametrize("name", ["my model", "_model", ".model"])
def test_a_run_folder_may_have_any_name(exported, tmp_path, name):
    import_checkpoint(exported, tmp_path / name)
    assert store.newest_whole(tmp_path / name).checkpoint.step == 0


def test_how_the_tokenizer_is_used_goes_through_a_run_that_starts_from_the_weights(exported, tmp_path):
    folder = shutil.copytree(exported, tmp_path / "theirs")
    usage = {
        "tokenizer_config.json": json.dumps({"chat_template": "{{ messages }}", "bos_token": "<s>", "added": [1]}),
        "special_tokens_map.json": '{"bos_token":   "<s>"}',
        "chat_template.jinja": "{{ messages }} ü\r\n",
        "generation_config.json": '{"eos_token_id": [3, 5], "temperature": 0.6}',
    }
    for name, text in usage.items():
        (folder / name).write_bytes(text.encode())
    import_checkpoint(folder, tmp_path / "imported")
    tuned = shutil.copytree(tmp_path / "imported", tmp_path / "tuned", ignore=shutil.ignore_patterns(*usage))
    run = load(tuned / "run.toml", {"model.weights": tmp_path / "imported"})
    write(tuned, run, Plan(), [folder])
    for source in ("imported", "tuned"):
        export_checkpoint(tmp_path / source, tmp_path / f"{source}-out")
        assert {name: (tmp_path / f"{source}-out" / name).read_bytes().decode() for name in usage} == usage


@pytest.mark.parametrize(("ending", "pads"), [("<|endoftext|>", None), ("\n", "<|endoftext|>")])
def test_rows_of_a_reward_model_are_filled_with_no_token_that_ends_a_conversation(exported, tmp_path, ending, pads):
    """Its class reads the score at the last token that is another."""
    model, tokenizer = decoder(score=True), Tokenizer.from_file(str(exported / "tokenizer.json"))
    eod_id = tokenizer.token_to_id("<|endoftext|>")
    hf.export_folder(model.config, model.state_dict(), tmp_path / "base", tokenizer=exported / "tokenizer.json",
                     eod_id=eod_id, usage={"generation_config.json": b"{}"})  # fmt: skip
    import_checkpoint(tmp_path / "base", tmp_path / "run")
    (tmp_path / "run" / "config.json").unlink()
    (tmp_path / "run" / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}" + ending)
    export_checkpoint(tmp_path / "run", tmp_path / "out")
    said = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (said["pad_token_id"], said["eos_token_id"]) == (pads and tokenizer.token_to_id(pads), eod_id)


@pytest.mark.parametrize("said", [{"eos_token_id": 0, "top_k": 5}, None])
def test_texts_end_with_an_answer_too_once_conversations_are_learned(said, tmp_path):
    symbols = ["<|endoftext|>", "<|im_end|>", *pre_tokenizers.ByteLevel.alphabet()]
    engine = Tokenizer(models.BPE(vocab={symbol: n for n, symbol in enumerate(symbols)}, merges=[]))
    engine.add_special_tokens(symbols[:2])
    engine.save(str(tmp_path / "tokenizer.json"))
    model, usage = decoder(), {"chat_template.jinja": CHATML.encode(), "tokenizer_config.json": b"{}"}
    hf.export_folder(model.config, model.state_dict(), tmp_path / "base", tokenizer=tmp_path / "tokenizer.json",
                     eod_id=0, usage=usage)  # fmt: skip
    (tmp_path / "base" / "generation_config.json").unlink()  # then config.json says it
    if said:
        (tmp_path / "base" / "generation_config.json").write_text(json.dumps(said))
    import_checkpoint(tmp_path / "base", tmp_path / "run")
    export_checkpoint(tmp_path / "run", tmp_path / "same")
    assert (tmp_path / "same" / "generation_config.json").is_file() == bool(said)
    save_run(load(tmp_path / "run" / "run.toml", {"train.objective": "sft"}), tmp_path / "run" / "run.toml")
    export_checkpoint(tmp_path / "run", tmp_path / "out")
    now = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert now["eos_token_id"] == [0, 1] and now.get("top_k") == (said or {}).get("top_k")


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of several files as its authors publish it: other dtypes, keys and files than we would write."""
    folder = tmp_path_factory.mktemp("published") / "model"
    theirs = random_theirs("mixtral").bfloat16()
    theirs.save_pretrained(folder, max_shard_size="60KB")
    config = json.loads((folder / "config.json").read_text()) | {"name_or_path": "team/model", "eos_token_id": [3, 5]}
    (folder / "config.json").write_text(json.dumps(config, separators=(", ", ":")))
    for name in ("generation_config.json", "chat_template.jinja", "tokenizer.model", "special_tokens_map.json"):
        (folder / name).write_text(f"what its authors say in {name}")
    symbols = ["<|endoftext|>", *sorted(pre_tokenizers.ByteLevel.alphabet())[:100]]
    Tokenizer(models.BPE(vocab={s: i for i, s in enumerate(symbols)}, merges=[])).save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize("url", ["", "file://"])
def test_a_model_comes_out_as_it_went_in_file_by_file(sharded, tmp_path, url):
    import_checkpoint(f"{url}{sharded}" if url else sharded, tmp_path / "run")
    export_checkpoint(tmp_path / "run", tmp_path / "out")
    names = {path.name for path in sharded.iterdir()}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    assert len([name for name in names if name.endswith(".safetensors")]) > 3
    for name in names:
        before, after = sharded / name, tmp_path / "out" / name
        if name.endswith(".safetensors"):
            tensors, again = load_file(before), load_file(after)
            assert tensors.keys() == again.keys()
            assert all(again[n].dtype == t.dtype and torch.equal(again[n], t) for n, t in tensors.items())
        else:
            assert after.read_bytes() == before.read_bytes(), name


def test_another_dtype_is_said_in_the_config_whose_other_keys_stay(sharded, tmp_path):
    import_checkpoint(sharded, tmp_path / "run")
    export_checkpoint(tmp_path / "run", tmp_path / "out", "fp32")
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (sharded, tmp_path / "out"))
    assert after == before | {"dtype": "float32"} and before["dtype"] == "bfloat16"
    assert {t.dtype for path in (tmp_path / "out").glob("*.safetensors") for t in load_file(path).values()} == {
        torch.float32
    }


def cut_off(folder: Path) -> None:
    file = sorted(folder.glob("*.safetensors"))[1]
    file.write_bytes(file.read_bytes()[:-100])


def remove_a_file(folder: Path) -> None:
    sorted(folder.glob("*.safetensors"))[1].unlink()


def move_a_name(folder: Path) -> None:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["lm_head.weight"] = sorted(folder.glob("*.safetensors"))[-1].name
    index["weight_map"]["model.norm.weight"] = sorted(folder.glob("*.safetensors"))[0].name
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def add_tokens(folder: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] |= {"one": 101, "more": 102}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def narrow_the_config(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 72}))


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (cut_off, r"model-00002-of-\d+\.safetensors is not safetensors: it is cut off: model\.\S+ ends at byte"),
        (remove_a_file, r"index\.json says that \S+ and \d+ more is in (\S+), and .*/\1 is not there"),
        (move_a_name, r"index\.json says that \S+ is in \S+, which does not hold it"),
        (add_tokens, r"tokenizer\.json has 103 tokens, and vocab_size = 101 in \S+/config\.json"),
        (narrow_the_config, r"safetensors: model\.layers\.0\.\S+ has shape \[.*and the config asks for"),
    ],
)
def test_a_folder_that_is_damaged_is_refused_by_file_and_key_and_nothing_is_written(sharded, tmp_path, harm, message):
    folder = shutil.copytree(sharded, tmp_path / "harmed")
    harm(folder)
    with pytest.raises(UserError, match=message):
        import_checkpoint(folder, tmp_path / "run")
    assert {path.name for path in tmp_path.iterdir()} == {"harmed"}


@pytest.fixture
def run_dir(trained: Path, tmp_path: Path) -> Path:
    """A copy of a finished run."""
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


def with_weights(run_dir: Path, weights: str) -> None:
    run = load(run_dir / "run.toml")
    prepare = run.data.prepare.model_copy(update={"input": ("hf://datasets/HuggingFaceFW/fineweb-edu/sample", "a.txt")})
    data = run.data.model_copy(update={"prepare": prepare})
    model = run.model.model_copy(update={"weights": Path(weights)})
    save_run(run.model_copy(update={"model": model, "data": data}), run_dir / "run.toml")


def card_in(folder: Path) -> ModelCard:
    return ModelCard.load(folder / "README.md")


def test_the_card_says_what_the_run_knows(run_dir: Path, tmp_path: Path) -> None:
    with_weights(run_dir, "hf://Qwen/Qwen3-0.6B@main")
    export_checkpoint(run_dir, tmp_path / "out", license_name="apache-2.0")
    card = card_in(tmp_path / "out")
    assert card.data.license == "apache-2.0" and card.data.library_name == "transformers"
    assert card.data.base_model == "Qwen/Qwen3-0.6B" and card.data.datasets == ["HuggingFaceFW/fineweb-edu"]
    for words in ("| steps | 40 |", "| tokens | ", "| training loss | ", "| validation loss | ", "| plan | `", "a.txt"):
        assert words in card.text
    assert str(run_dir.parent) not in card.text  # paths of this machine say nothing to others


def test_the_card_of_a_run_on_preferences_in_stages_says_so(run_dir: Path, tmp_path: Path) -> None:
    run = load(run_dir / "run.toml")
    data = {"stages": (DataStage(from_step=4, sources={"/here/later": 1.0}),)}
    save_run(run.with_keys(train={"objective": "dpo"}, data=data), run_dir / "run.toml")
    export_checkpoint(run_dir, tmp_path / "out")
    card = card_in(tmp_path / "out")
    assert re.search(r"\| training loss \| [\d.]+ \|", card.text) and "| prepared, from step 4 | `later` |" in card.text


@pytest.mark.parametrize(
    ("place", "name", "revision"),
    [
        ("hf://Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B", ""),
        ("hf://Qwen/Qwen3-0.6B@main", "Qwen/Qwen3-0.6B", "main"),
        ("runs/base@1", "runs/base@1", ""),
    ],
)
def test_libraries_of_the_hub_find_a_base_by_its_name(place: str, name: str, revision: str) -> None:
    assert hub_name(place) == (name, revision)


def test_without_a_license_it_is_unknown(run_dir: Path, tmp_path: Path) -> None:
    export_checkpoint(run_dir, tmp_path / "out", format="gguf")
    card = card_in(tmp_path / "out")
    assert card.data.license == "unknown" and card.data.library_name == "gguf" and card.data.base_model is None


def test_a_readme_of_the_users_is_taken_unless_told_otherwise(run_dir: Path, tmp_path: Path) -> None:
    (run_dir / "README.md").write_text("mine\n")
    export_checkpoint(run_dir, tmp_path / "kept")
    assert (tmp_path / "kept" / "README.md").read_text() == "mine\n"
    export_checkpoint(run_dir, tmp_path / "anew", overwrite=True)
    assert "| steps | 40 |" in (tmp_path / "anew" / "README.md").read_text()
    assert (run_dir / "README.md").read_text() == "mine\n"


def test_the_card_of_the_weights_is_kept_beside_that_of_the_run(run_dir: Path, tmp_path: Path) -> None:
    export_checkpoint(run_dir, tmp_path / "base")
    (tmp_path / "base" / "README.md").write_text("---\nlicense: mit\n---\ntheirs\n")
    import_checkpoint(tmp_path / "base", tmp_path / "imported")
    assert (tmp_path / "imported" / "README-base.md").read_text().endswith("theirs\n")
    export_checkpoint(tmp_path / "imported", tmp_path / "again")
    assert (tmp_path / "again" / "README.md").read_text().endswith("theirs\n")  # nothing was trained
    assert not (tmp_path / "again" / "README-base.md").exists()
    shutil.copy(tmp_path / "imported" / "README-base.md", run_dir)  # as a run that starts from these weights has it
    export_checkpoint(run_dir, tmp_path / "tuned")
    assert (tmp_path / "tuned" / "README-base.md").read_text().endswith("theirs\n")
    assert "[README-base.md](README-base.md)" in (tmp_path / "tuned" / "README.md").read_text()
