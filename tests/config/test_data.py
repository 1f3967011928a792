"""What the table `data` says of prepared folders, of preparing, and of the cache; what does not go together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from argosy.config.data import CacheConfig, DataConfig, FiltersConfig, PrepareConfig, by_option, row_kind


def test_the_cache_is_where_the_user_says_or_in_the_users_caches(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert CacheConfig().path == tmp_path / ".cache/argosy/data"
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache")
    assert CacheConfig().path == Path("/var/cache/argosy/data")
    assert CacheConfig(folder="~/here").path == tmp_path / "here"
    assert CacheConfig(size_gb=0.5).size_bytes == 500_000_000


@pytest.mark.parametrize(
    ("objective", "kind"), [("sft", "conversations"), ("kto", "judged"), ("dpo", "pairs"), ("reward", "pairs")]
)
def test_rows_hold_what_the_objective_learns_from(objective: str, kind: str) -> None:
    assert row_kind(objective) == kind and PrepareConfig.model_validate({"objective": objective}).has_conversations
    assert not PrepareConfig().has_conversations and not PrepareConfig(objective="pretrain").has_conversations


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"objective": "sft", "max_text_bytes": 5}, "max_text_bytes would cut a conversation anywhere; leave it out"),
        ({"objective": "dpo", "filters": {"quality": True}}, "filters judge text, not conversations; only filters.dup"),
        ({"objective": "dpo", "filters": {"duplicates": "drop_near"}}, "filters judge text, not conversations"),
        ({"field": ["a", "b"], "input": ["x"]}, "field names 2 fields for 1 places of input; give one for all, or one"),
        ({"field": []}, "field names 0 fields for 0 places of input"),
        ({"filters": {"language_score": 1.5}}, "less than or equal to 1"),
        ({"validation_fraction": 1.0}, "less than 1"),
    ],
)
def test_keys_that_do_not_go_together_are_refused(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError) as refused:
        PrepareConfig.model_validate(keys)
    assert said in str(refused.value)


def test_each_place_has_a_field_of_its_own_or_all_have_one() -> None:
    assert PrepareConfig(input=("a", "b"), field="body").fields == ("body", "body")
    assert PrepareConfig(input=("a", "b"), field=("x", "y")).fields == ("x", "y")
    assert PrepareConfig(objective="sft", filters=FiltersConfig(duplicates="drop_exact")).has_conversations


@pytest.mark.parametrize(
    ("text", "of_prepare", "of_train"),
    [
        ("input = a.txt is no file", "a.txt is no file", "a.txt is no file"),
        ("vocab_size = 5 is too small; raise `vocab_size`", "--vocab-size 5 is too small; raise --vocab-size",
         "--data.prepare.vocab-size 5 is too small; raise --data.prepare.vocab-size"),
        ("seq_len = 8; set `objective`", "--seq-len 8; set --objective", "--data.seq-len 8; set --train.objective"),
        ("filters.min_chars = 5 and model.field = 3", *["filters.min_chars = 5 and model.field = 3"] * 2),
    ],
)  # fmt: skip
def test_a_message_names_the_options_that_were_typed(text: str, of_prepare: str, of_train: str) -> None:
    assert (by_option(text), by_option(text, of_run=True)) == (of_prepare, of_train)


def test_folders_are_those_of_all_mixtures_once() -> None:
    stages = [{"from_step": 3, "sources": {"b": 1.0, "c": 2.0}}, {"from_step": 5, "sources": {"a": 1.0}}]
    assert DataConfig.model_validate({"sources": {"a": 1.0, "b": 1.0}, "stages": stages}).folders == ["a", "b", "c"]
