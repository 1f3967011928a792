"""The process of a site's exchange says in words why it cannot begin."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from argosy.config.dump import save_run
from argosy.config.schema import RunConfig
from argosy.config.sync import SiteConfig, SyncConfig
from argosy.errors import StorageError
from argosy.observe.events import Events
from argosy.sync import links, process


def test_a_port_that_is_taken_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    folder = tmp_path / "sites" / "oslo"
    folder.mkdir(parents=True)
    monkeypatch.setattr(links, "BIND_S", 0.0)
    monkeypatch.setattr(process, "channel_to_parent", lambda: None)
    monkeypatch.setattr(sys, "argv", ["process", str(folder)])
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        both = {"oslo": address, "lyon": "127.0.0.1:1"}
        sites = tuple(SiteConfig(name=name, address=where, batch=4) for name, where in both.items())
        run = RunConfig(name="two", site="oslo", sites=sites, sync=SyncConfig(tls=False))
        save_run(run, folder / "run.toml")
        with pytest.raises(SystemExit) as ended:
            process.main()
    out, _ = capfd.readouterr()
    assert ended.value.code == 2
    assert f"sites: oslo cannot listen at {address} (Address already in use). Is the run training there already?" in out
    assert "Traceback" not in out


def test_it_is_started_again_as_long_as_the_run_s_folder_is_there(tmp_path: Path, monkeypatch, capsys) -> None:
    def dies(*_: str) -> None:
        raise OSError("dead")

    monkeypatch.setattr(process, "Child", dies)
    (folder := tmp_path / "oslo").mkdir()
    run = RunConfig(name="two", site="oslo", sites=(SiteConfig(name="oslo"), SiteConfig(name="lyon")))
    save_run(run, folder / "run.toml")
    exchange = process.exchange_of(folder, run, Events(folder, "launcher"))
    assert exchange is not None
    exchange.start()
    assert "it is started again" in capsys.readouterr().err
    (folder / "run.toml").unlink()
    with pytest.raises(StorageError, match=r"oslo has lost its run\.toml"):
        exchange.start()
