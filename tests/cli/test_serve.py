"""`argosy serve`: what is told before a model is loaded."""

import pytest

from argosy.cli import serve
from argosy.errors import UserError
from argosy.inference import loaded_model


def test_a_port_that_cannot_be_is_told_before_the_model_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(loaded_model, "load_model", lambda *_: pytest.fail("it was loaded"))
    with pytest.raises(UserError, match="--port 70000: a port is a number"):
        serve.main([str(tmp_path), "--port", "70000"])
