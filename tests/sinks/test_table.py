"""Which sinks a run may name."""

from __future__ import annotations

import pytest

from argosy.config.extend import ExtendConfig
from argosy.config.observe import ObserveConfig
from argosy.errors import UserError
from argosy.extend.loading import approve
from argosy.sinks import table
from argosy.sinks.sink import Sink


def observe(*sinks: str, **tables: dict[str, object]) -> ObserveConfig:
    return ObserveConfig.model_validate({"sinks": sinks, **tables})


def test_every_sink_of_the_table_can_be_imported():
    for name, entry in table.SINKS.items():
        assert issubclass(entry.load(), Sink), name


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("tensorbord", "did you mean 'tensorboard'?"),
        ("nothing-like-it", 'name a class: "module:Class"'),
        ("no_such_module:Sink", "there is no module 'no_such_module'"),
    ],
)
def test_a_sink_that_does_not_exist_is_refused(name, said):
    with pytest.raises(UserError, match=r"observe\.sinks") as error:
        table.check_sinks(observe(name))
    assert said in str(error.value)


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    monkeypatch.setattr(table, "is_installed", lambda package: False)
    with pytest.raises(UserError, match=r"pip install 'argosy\[tensorboard\]'"):
        table.check_sinks(observe("tensorboard"))


def test_a_sink_of_the_user_s_is_declared_in_a_file_of_the_run(tmp_path):
    path = tmp_path / "mine.py"
    head = "from argosy import extend\nfrom argosy.sinks.sink import Sink\n\n"
    path.write_text(f"{head}@extend.sink('mine')\nclass Mine(Sink): ...\n\n@extend.sink('odd')\nclass Odd: ...\n")
    extend = ExtendConfig(files=(path,))
    approve(extend.code)
    table.check_sinks(observe("mine"), extend)
    assert table.entry_of("mine", extend).load().__name__ == "Mine"
    with pytest.raises(UserError, match=r"mine.py:7: the sink odd must be a subclass"):
        table.entry_of("odd", extend).load()
    with pytest.raises(UserError, match="did you mean 'mine'"):
        table.check_sinks(observe("mina"), extend)


def test_a_sink_is_named_once():
    with pytest.raises(UserError, match="twice"):
        table.check_sinks(observe("tensorboard", "tensorboard"))


def test_an_endpoint_that_others_reach_needs_a_token(monkeypatch):
    monkeypatch.delenv("ARGOSY_METRICS_TOKEN", raising=False)
    table.check_sinks(observe("prometheus"))
    with pytest.raises(UserError, match="ARGOSY_METRICS_TOKEN"):
        table.check_sinks(observe("prometheus", prometheus={"host": "0.0.0.0"}))
    monkeypatch.setenv("ARGOSY_METRICS_TOKEN", "short")
    with pytest.raises(UserError, match="16 characters"):
        table.check_sinks(observe("prometheus", prometheus={"host": "0.0.0.0"}))
