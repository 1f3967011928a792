"""Turn text into token shards, once, for any number of runs.

After an interruption it goes on from the last whole shard (--shard-tokens). It does nothing if the folder already
holds the same.

Examples:
  argosy prepare book.txt notes/ --out data/mine                  files and folders; a tokenizer is trained on them
  argosy prepare 'dumps/*.jsonl.zst' --field content --out data/web
  argosy prepare builtin:python --out data/python --vocab-size 8192
  argosy prepare web/ --out data/web --remote s3://bucket/web     and copy them to an object store
  argosy prepare --out data/mine --verify                         read every byte back against its checksum
  argosy prepare source:poems --extend poems.py --out data/poems     documents out of a function of yours
  argosy prepare /shared/texts --out /shared/data --on slurm --processes 64     workers on a cluster
  argosy prepare book.txt --out data/more --tokenizer runs/mine   for a model that is there: with its tokenizer
  argosy prepare chats.jsonl --objective sft --tokenizer runs/base --out data/chats --show 3    look at what is learned
  argosy prepare megatron-shards/ --adopt --tokenizer tokenizer.json    use shards that another program wrote
"""

from __future__ import annotations

import signal
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import tyro

from argosy.cli.documents import DryRun, show_dry_run, write
from argosy.cli.options import parse_section
from argosy.config.data import DataConfig, PrepareConfig, by_option
from argosy.config.extend import ExtendConfig
from argosy.config.launch import ClusterOptions, LaunchOptions, ProgramEngine
from argosy.config.layers import Setting, Source
from argosy.config.load import OPTION_MARK, build
from argosy.errors import ArgosyWarning, DataError, Interrupted, RunFailed, UserError, signals_to
from argosy.observe.screen import Progress
from argosy.observe.terminal import lasting_output, printable

LITTLE_HELD_OUT = 8 * DataConfig().seq_len
"""Tokens: eight samples of the usual length."""
GREEN_STYLE, RESET_STYLE = "\x1b[1;32m", "\x1b[0m"
"""Bold green, and as it was (ECMA-48: SGR)."""


@dataclass(frozen=True, kw_only=True)
class _PrepareOptions:
    verify: bool = False
    """Only check the folder `--out`, byte by byte."""
    adopt: bool = False
    """The input is one folder of Megatron .bin/.idx shards: write a manifest for it, copy nothing."""
    extend: tuple[Path, ...] = ()
    """Python files with sources of your own, for input such as source:NAME."""
    on: ProgramEngine = "local"
    """Engine that runs the workers; all machines must see --out, and the input where it is not a URL."""
    cpus: int = 1
    """slurm, ray: CPUs of each worker."""
    show: int = 0
    """Print this many of the conversations: what is learned is green in a terminal, and else between {+ and +}."""
    dry_run: bool = False
    """Say what would be read and written, and do nothing."""
    json: bool = False
    """Print JSON: the manifest."""


@dataclass(frozen=True, kw_only=True)
class Options(ClusterOptions, _PrepareOptions):
    """Options of `argosy prepare`, and at last those of a cluster."""

    extra: tyro.conf.UseAppendAction[tuple[str, ...]] = ()


class Positional(PrepareConfig):
    """Text in, token shards out."""

    input: tyro.conf.Positional[tuple[str, ...]] = ()
    """Files, folders, globs, fsspec URLs, or builtin:python."""


@lasting_output()
def main(argv: list[str]) -> None:
    options, config = parse_section(argv, "argosy prepare", Options, Positional)
    try:
        with signals_to(_stop, signal.SIGTERM, signal.SIGUSR1):
            _prepare(options, config)
    except (UserError, DataError, RunFailed) as error:
        raise type(error)(by_option(str(error))) from None


def _prepare(options: Options, config: Positional) -> None:
    _check_conversations(options, config)
    if options.dry_run:
        show_dry_run(_would(options, config), options.json)
        return
    progress = Progress(enabled=True)
    if options.verify:
        from argosy.data.manifest import verify

        manifest, folder = verify(config.out), config.out
    elif options.adopt:
        from argosy.data.adopt import adopt

        folder, tokenizer = _to_adopt(config)
        manifest = adopt(folder, tokenizer)
    else:
        from argosy.data.prepare import prepare
        from argosy.data.stores.store import check_remote

        _check_input(config)
        if config.remote:
            check_remote(config.remote)
        folder = config.out
        with progress.during("looking for the input"):
            manifest = prepare(
                PrepareConfig(**config.model_dump()),
                lambda state: progress.note(str(state), last=state.stage == "done"),
                _extend(options.extend),
                _machines(options),
            )
        progress.close()
        if config.validation_fraction and manifest.tokens("validation") < LITTLE_HELD_OUT:
            warnings.warn(
                f"{folder}: {manifest.tokens('validation')} tokens are held out, too few for a steady validation loss. "
                f"Prepare more text, or raise --validation-fraction (it is {config.validation_fraction:g}).",
                ArgosyWarning,
                stacklevel=1,
            )
    if config.remote and not options.verify:
        _copy(folder, config.remote, progress)
    if options.json:
        write("prepare", manifest)
        return
    if made_of := manifest.in_words():
        print(printable(f"{folder}: {made_of}"))
    splits = ", ".join(f"{name} {_tokens(manifest.tokens(name))}" for name in manifest.splits)
    checked = "; every byte matches its checksum" if options.verify else ""
    print(f"{folder}: {splits}; vocabulary {manifest.vocab_size}{checked}")
    if options.show:
        _show(folder, options.show)


def _check_conversations(options: Options, config: Positional) -> None:
    if options.show < 0:
        raise UserError(f"--show {options.show}: give the number of conversations to print, e.g. --show 3.")
    if options.show and options.json:
        raise UserError("--show prints text, and --json nothing but JSON. Leave one of them out.")
    if options.show and not (config.has_conversations or options.verify):
        raise UserError(f"--show {options.show} prints conversations: say what they are for, e.g. --objective sft.")
    for key in () if config.has_conversations else ("seq_len", "chat_template"):
        if value := getattr(config, key):
            raise UserError(f"{key} = {value} is of conversations: say what they are for, e.g. --objective sft.")


def _show(folder: Path, count: int) -> None:
    from argosy.data.chat_encoder import conversations_in
    from argosy.data.manifest import Manifest

    if (rows := Manifest.load(folder, check_shards=False).rows) is None:
        raise UserError(f"{folder} holds text, and no conversations that --show could print.")
    begin, end = (GREEN_STYLE, RESET_STYLE) if sys.stdout.isatty() else ("{+", "+}")
    sides = {True: ", rejected", False: ", chosen"} if rows.kind == "pairs" else {True: ", undesirable", False: ""}
    number = 0
    for shown in conversations_in(folder):
        number += not (shown.is_rejected and rows.kind == "pairs")
        if number > count:
            break
        print(f"\n--- conversation {number}{sides[shown.is_rejected]}")
        print("".join(f"{begin}{printable(t)}{end}" if learned else printable(t) for t, learned in shown.pieces))


def _to_adopt(config: Positional) -> tuple[Path, Path]:
    """Return the folder of shards and their tokenizer. Raises: UserError."""
    if len(config.input) != 1 or config.tokenizer is None:
        raise UserError("--adopt takes one folder of shards, and --tokenizer with the tokenizer.json they are of.")
    return Path(config.input[0]), config.tokenizer


def _check_input(config: Positional) -> None:
    if not config.input:
        raise UserError(
            "nothing to prepare. Name files, folders, globs or URLs: argosy prepare book.txt --out data/mine"
        )


def _would(options: Options, config: Positional) -> DryRun:
    """Return what the command would do. Raises: UserError, as it would."""
    from argosy.data.prepare import would_prepare

    if options.verify:
        raise UserError("--verify only reads: leave out --dry-run.")
    copied = [f"copy it to {config.remote}"] if config.remote else []
    if options.adopt:
        folder, _ = _to_adopt(config)
        return DryRun((f"write a manifest and the tokenizer into {folder}, and copy no shard", *copied), folder)
    _check_input(config)
    would = would_prepare(PrepareConfig(**config.model_dump()), _extend(options.extend), _machines(options))
    return DryRun((*would, *copied), config.out)


def _machines(options: Options) -> LaunchOptions:
    if options.cpus < 1:
        raise UserError(f"--cpus {options.cpus}: each worker needs one at least. Try --cpus 1.")
    return options.launch_options(on=options.on, cpus_per_node=options.cpus if options.cpus > 1 else 0)


def _stop(number: int, _: object) -> NoReturn:
    """Unwind, so that the workers on other machines are ended as well."""
    signal.signal(number, signal.SIG_IGN)
    name = signal.Signals(number).name
    raise Interrupted(f"stopped by {name}: the same command goes on from the last finished results.", number)


def _copy(folder: Path, url: str, progress: Progress) -> None:
    from argosy.data.stores.store import upload

    upload(folder, url, lambda done, files: progress.note(f"copying to {url}: {done} of {files} files", done == files))
    progress.close()


def _extend(files: tuple[Path, ...]) -> ExtendConfig:
    source = Source(OPTION_MARK)
    return build(ExtendConfig, {("files",): Setting([str(file.absolute()) for file in files], source)})


def _tokens(count: int) -> str:
    return f"{count / 1e6:.2f}M tokens" if count >= 1e5 else f"{count} tokens"
