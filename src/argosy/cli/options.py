"""The command line of one command: its own options, every key of the run as one more, and its `--help`.

The values of keys go to `argosy.config` as they were typed, so that a file and the command line are checked by the same
rules and answered in the same words."""

from __future__ import annotations

import inspect
import re
import sys
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import field, fields, make_dataclass
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import tyro
from pydantic.fields import FieldInfo
from typing_extensions import Doc

from argosy.cli.parser import HELP_OPTIONS, RUN_ARGUMENT, described, explained, fitted, no_hint, unknown_options
from argosy.config.idle import load_told
from argosy.config.layers import RENAMED, Setting, Source, new_key
from argosy.config.load import OPTION_MARK, build, load, origin_of
from argosy.config.problems import ELSEWHERE, suggestion
from argosy.config.schema import RunConfig
from argosy.config.section import Key, Mark, Section, count_of, dotted, key_fields, key_of, meanings, value_type
from argosy.errors import ArgosyWarning, UserError

if TYPE_CHECKING:
    from argosy.watch.reader import RunReader

HELP_ALL = "--help-all"
"""The word that asks for the options of all keys."""
OTHER_OPTIONS = f"""\
Every other key of a run is an option too: {HELP_ALL} shows all of them, `argosy config show [RUN]` shows them with the
values in force."""

RunPath = Annotated[Path, tyro.conf.Positional, Doc("A run's folder.")]
ModelPath = Annotated[str, tyro.conf.Positional, Doc(
    "A run's folder (its newest checkpoint), one checkpoint, or a Hugging Face folder or its URL."
)]  # fmt: skip
ModelPlan = Annotated[str, Doc(
    'Plan by which the model is laid out and computes, such as "tp=2" or "precision=bf16"; empty: one device, fp32.'
)]  # fmt: skip
TrustCode = Annotated[bool, Doc(
    "Approve and run code that the run brings along (extend.files); otherwise only code that you trained with."
)]  # fmt: skip
PrintJson = Annotated[bool, Doc("Print JSON.")]
Temperature = Annotated[float, Doc("0 takes the most likely token each time; higher is more varied.")]
TopP = Annotated[float, Doc("Draw from the most likely tokens that together have this probability.")]
HostAddress = Annotated[str, Doc("Address to listen at; 0.0.0.0: all of this machine's.")]

ESSENTIAL: tuple[Key, ...] = tuple(map(key_of, (
    "name", "model.preset", "model.weights", "data.prepare.input", "data.sources", "data.seq_len",
    "train.global_batch", "train.steps", "train.minutes", "train.epochs", "optimizer.lr", "evaluate.every_steps",
    "checkpoint.every_steps", "plan", "launch.processes", "seed",
)))  # fmt: skip
"""In the order of --help. Their meanings begin with the words that people search for (`config.schema`)."""


ExtraT = TypeVar("ExtraT")
SectionT = TypeVar("SectionT", bound=Section)

NONE = "none"
"""The word on the command line for a key that TOML would leave out."""


def parse_run(
    argv: list[str], prog: str, extra: type[ExtraT], about: str | None = None, idle: Collection[str] = ()
) -> tuple[ExtraT, RunConfig]:
    """`[RUN] [--section.key value ...]`: the command's own options and the resolved run.

    extra: a dataclass of the command's options (all with defaults, documented by docstrings).
    about: the description in --help, in place of the docstring of the module that defines `extra`. Of the keys, --help
        shows the `ESSENTIAL` ones but the `idle` ones, which have no effect on this command, and --help-all
        shows all; both show the run's values in force.
    Raises: UserError for what is wrong in file or options; SystemExit after --help, or if tyro refuses.
    """
    source, rest = (argv[0], argv[1:]) if argv and not argv[0].startswith("-") else (None, argv)
    run, about = load(source), about or _description(extra)
    if any(word in HELP_OPTIONS for word in rest):
        _show_essential(prog + RUN_ARGUMENT, extra, run, about, [key for key in ESSENTIAL if dotted(key) not in idle])
    options, overrides = _parse(_helped(rest), prog + RUN_ARGUMENT, extra, run, about)
    return options, load_told(source, overrides)


def origin(argv: list[str], key: str) -> str:
    """Return where `key` has its value from if `argv` are the words of `parse_run`: an option, a line, or nowhere."""
    source = argv[0] if argv and not argv[0].startswith("-") else None
    words = (word.removeprefix(OPTION_MARK).split("=")[0] for word in argv if word.startswith(OPTION_MARK))
    return origin_of(source, key, {dotted(key_of(word)) for word in words})


def parse_section(argv: list[str], prog: str, extra: type[ExtraT], section: type[SectionT]) -> tuple[ExtraT, SectionT]:
    """Like `parse_run`, for a command whose options are one section: its keys stand without a prefix.

    A field of `section` may be `tyro.conf.Positional`. Paths are left as typed.
    """
    options, overrides = _parse(_helped(argv), prog, extra, section(), _description(extra))
    return options, build(section, {key_of(k): Setting(v, Source(OPTION_MARK)) for k, v in overrides.items()})


def parse(argv: list[str], prog: str, options: type[ExtraT], about: str | None = None) -> ExtraT:
    """Parse the options of a command that takes no run into a dataclass. Raises: as `parse_run`.

    about: the description in --help, in place of the docstring of the module that defines `options`.
    """
    found: ExtraT
    argv = _with_plain_counts(_helped(argv), options)
    form = explained(options) if any(word in HELP_OPTIONS for word in argv) else options
    try:
        found, unknown = described(form, prog, about or _description(options), argv)
    except UserError:
        _refuse(unknown_options(options, prog, argv), prog, options, Section)
        raise
    _refuse(unknown, prog, options, Section)
    return found


def act(command: str, actions: Mapping[str, Callable[[list[str]], int | None]], argv: list[str]) -> int:
    """Run the action of a command that its first word names; without one, print them all. Raises: UserError."""
    if not argv or argv[0] in (*HELP_OPTIONS, HELP_ALL):
        about = sys.modules[f"argosy.cli.{command}"].__doc__ or ""
        print(f"usage: argosy {command} {{{','.join(actions)}}} ...\n\n{fitted(about)}")
        return 0
    if argv[0] not in actions:
        raise UserError(f"{command} {argv[0]}: there is no such action. Try: {', '.join(actions)}.")
    return actions[argv[0]](argv[1:]) or 0


def about_action(action: Callable[..., object]) -> str:
    """Return the description of an action in --help: its docstring, and those examples of its module that are its."""
    module = sys.modules[action.__module__]
    words = f"argosy {module.__name__.rpartition('.')[2]} {action.__name__.removeprefix('_')}"
    examples = re.findall(rf"^  {words}\b.*(?:\n {{3,}}.*)*", module.__doc__ or "", re.M)
    return "\n".join([inspect.getdoc(action) or "", "", "Examples:", *examples])


def _helped(argv: list[str]) -> list[str]:
    """Return the words with --help in place of --help-all, which shows all where --help would show a part."""
    return ["--help" if word == HELP_ALL else word for word in argv]


def _with_plain_counts(argv: list[str], options: type) -> list[str]:
    """Return the words with large numbers written out: 1T as 1000000000000. Raises: UserError for what is no number."""
    types = get_type_hints(options, include_extras=True)
    counts = {name for name, kind in types.items() if _is_count(kind)}
    words: list[str] = []
    for word in argv:
        option, equals, value = word.partition("=")
        if equals and _name(option) in counts:
            words.append(f"{option}={_plain(option, value)}")
        elif words and _name(words[-1]) in counts and not word.startswith("--"):
            words.append(_plain(words[-1], word))
        else:
            words.append(word)
    return words


def _is_count(kind: Any) -> bool:
    return Mark.COUNT in getattr(kind, "__metadata__", ()) or any(_is_count(inner) for inner in get_args(kind))


def _name(word: str) -> str:
    return word.removeprefix(OPTION_MARK).replace("-", "_") if word.startswith(OPTION_MARK) else ""


def _plain(option: str, value: str) -> str:
    try:
        return str(count_of(value))
    except ValueError as error:
        raise UserError(f"{option} {value}: {error}.") from None


def _show_essential(prog: str, extra: type, run: RunConfig, about: str, shown: Sequence[Key]) -> None:
    """Print the help with the command's own options and these keys of the run. Raises: SystemExit."""
    parts: list[tuple[str, Any, Any]] = []
    for key in shown:
        section: Section = reduce(getattr, map(str, key[:-1]), run)
        name, schema = str(key[-1]), type(section)
        value, option = getattr(section, name), dotted(key).replace("_", "-")
        leaf = _leaf(schema.model_fields[name], value, meanings(schema)[name], option)
        parts.append(("_".join(map(str, key)), leaf, field(default=_words(value))))
    form = _side_by_side(explained(extra), make_dataclass("Keys", parts))
    described(form, prog, f"{about}\n\n{OTHER_OPTIONS}", ["--help"])


def _parse(
    argv: list[str], prog: str, extra: type[ExtraT], config: Section, about: str
) -> tuple[ExtraT, dict[str, object]]:
    """The command's options, and the keys of `config` that the command line changes: dotted key -> value."""
    shown = any(word in HELP_OPTIONS for word in argv)
    argv = _by_new_names(argv)
    typed = {key_of(word[2:].split("=")[0]) for word in argv if word.startswith("--")}
    form = _form(config, None if shown else typed)
    both = _side_by_side(explained(extra) if shown else extra, type(form))
    found, unknown = described(both, prog, about, argv)
    _refuse(unknown, prog, extra, type(config))
    return found.extra, dict(_changes(form, found.run, config, typed))


def _side_by_side(extra: Callable[[], Any], run: Callable[[], Any]) -> type:
    """Return the form whose options are those of both, without a prefix."""
    forms = {"extra": extra, "run": run}
    flat = tyro.conf.arg(name="")
    parts = [(name, Annotated[form, flat], field(default_factory=form)) for name, form in forms.items()]
    return make_dataclass("Both", parts)


def _by_new_names(argv: list[str]) -> list[str]:
    """Return the words with renamed options under their new names, with a warning for each.

    Raises: UserError if an option is given by both names.
    """
    typed = {word: key_of(word[len(OPTION_MARK) :].split("=")[0]) for word in argv if word.startswith(OPTION_MARK)}

    def named(word: str) -> str:
        if typed.get(word) not in RENAMED:
            return word
        new = OPTION_MARK + dotted(new_key(typed[word], OPTION_MARK, typed.values()))
        return "=".join([new, *word.split("=", 1)[1:]])

    return [named(word) for word in argv]


def _description(options: type) -> str:
    return (sys.modules[options.__module__].__doc__ or "").strip()


def _refuse(unknown: list[str], prog: str, extra: Any, schema: type[Section]) -> None:
    """Raise one UserError for all words that no option takes."""
    hidden = {key for key, info in key_fields(schema).items() if Mark.NO_OPTION in info.metadata}
    known = {(f.name,) for f in fields(extra)} | (key_fields(schema).keys() - hidden)
    lines = []
    for name in (word.split("=")[0] for word in unknown if word.startswith("-")):
        key = key_of(name.lstrip("-"))
        elsewhere = ELSEWHERE if schema is RunConfig else {}  # another command has no keys of a run
        alone = "give its value alone." if key in known and name.startswith(OPTION_MARK) else ""
        hint = alone or suggestion(key, known, OPTION_MARK, elsewhere)
        hint = re.sub(rf"{OPTION_MARK}\S+", lambda option: option[0].replace("_", "-"), hint)  # as --help spells them
        hint = "set it in the run file." if key in hidden else hint
        lines.append(f"{name}: {'no' if key in hidden else 'unknown'} option; {hint}")
    if unknown and not lines:
        order = ", and RUN comes first" if prog.endswith(RUN_ARGUMENT) else ""
        example = f", as --prompt {' '.join(unknown)!r}" if ("prompt",) in known else ""
        lines = [f"{' '.join(unknown)}: unexpected; options begin with --{order}{example}."]
    if lines:
        all_options = f"{prog.removesuffix(RUN_ARGUMENT)} {HELP_ALL if prog.endswith(RUN_ARGUMENT) else '--help'}"
        raise UserError("\n".join([*lines, f"  All options: {all_options}"]))


# A form is a section as the command line sees it: a dataclass of the same shape whose leaves are words.


def _form(config: Section, typed: Collection[Key] | None, above: Key = ()) -> Any:
    """The form of `config`, with its values as defaults.

    typed: the keys that it has beside positional ones, as tyro takes a millisecond for each; None: it is shown, with
    all keys and the meaning of each.
    """
    meaning = meanings(type(config)) if typed is None else {}
    parts: list[tuple[str, Any, Any]] = []
    for name, info in type(config).model_fields.items():
        value, key = getattr(config, name), (*above, name)
        if isinstance(value, Section):
            if typed is None or any(other[: len(key)] == key for other in typed):
                inner = _form(value, typed, key)
                about = tyro.conf.arg(help=type(value).__doc__)
                parts.append((name, Annotated[type(inner), about], field(default=inner)))
        elif Mark.NO_OPTION not in info.metadata and (
            typed is None or key in typed or tyro.conf.Positional in info.metadata
        ):
            parts.append((name, _leaf(info, value, meaning.get(name)), field(default=_words(value))))
    form = make_dataclass(type(config).__name__, parts, frozen=True)
    form.__doc__ = type(config).__doc__
    return form()


def _leaf(info: FieldInfo, value: object, meaning: str | None, name: str | None = None) -> Any:
    """The form's type for one key: words, with the metavar and the help of the schema; name: if not the field's."""
    kind = value_type(info)
    shape: Any = {tuple: tuple[str, ...], dict: tuple[tuple[str, str], ...]}.get(get_origin(kind), str)
    is_repeated = Mark.REPEATED in info.metadata
    about = tyro.conf.arg(
        name=name,
        help=meaning and " ".join(meaning.split()),
        help_behavior_hint=f"(default: {' '.join(_words(value))})" if is_repeated else no_hint(value),
        metavar=_metavar(kind).removesuffix(" ...") if is_repeated else _metavar(kind),
    )
    marks = [tyro.conf.UseAppendAction] * is_repeated + [m for m in info.metadata if m is tyro.conf.Positional]
    for mark in (about, *marks):
        shape = Annotated[shape, mark]
    return shape


def _metavar(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "{" + ",".join(get_args(kind)) + "}"
    names = {int: "INT", float: "NUMBER", bool: "{true,false}", str: "TEXT", Path: "PATH"}
    return names.get(kind) or {dict: "PATH WEIGHT ...", tuple: "TEXT ..."}[get_origin(kind)]


def _words(value: object) -> Any:
    """A value as the command line spells it."""
    if isinstance(value, Mapping):
        return tuple((str(key), str(weight)) for key, weight in value.items())
    if isinstance(value, tuple):
        return tuple(str(item) for item in value)
    if isinstance(value, bool):
        return str(value).lower()
    return NONE if value is None else str(value)


def _changes(before: Any, after: Any, config: Section, typed: Collection[Key], above: Key = ()) -> Any:
    """Yield (dotted key, value) for each leaf of the form that was typed (positional: that has changed)."""
    for name, info in type(config).model_fields.items():
        value = getattr(config, name)
        old, new = getattr(before, name, None), getattr(after, name, None)
        if isinstance(value, Section):
            yield from _changes(old, new, value, typed, (*above, name))
        elif old != new or (*above, name) in typed:
            appended = len(_words(value)) if Mark.REPEATED in info.metadata else 0  # tyro keeps the default
            yield dotted((*above, name)), _meaning(new[appended:] if appended and new else new, info)


def _meaning(words: Any, info: FieldInfo) -> object:
    """Return the value that typed words mean; words without meaning stay words, for the schema to refuse."""
    kind = value_type(info)
    if words == NONE and type(None) in get_args(info.annotation):
        return None
    if get_origin(kind) is dict:
        return {key: _number(weight) for key, weight in words}
    return _number(words) if kind in (int, float, bool) else words


def _number(word: str) -> object:
    for kind in (int, float, count_of):
        with suppress(ValueError):
            return kind(word)
    return {"true": True, "false": False}.get(word.lower(), word)


def read_run(folder: Path) -> RunReader:
    """Return all that a run's folder tells. Raises: UserError if it holds no run."""
    from argosy.watch.reader import RunReader

    warnings.simplefilter("ignore", ArgosyWarning)  # of an old run.toml: it is the run that is asked to change it
    return RunReader.read(folder)


def must_be_folder(place: str | Path, or_url: bool = False) -> None:
    """Raise UserError unless it is a folder, or, if so asked, a URL: before torch is imported, which takes seconds."""
    if Path(place).is_dir():
        return
    from argosy.data.stores.store import is_url, spelled  # it loads what commands without a store do without

    if not is_url(place):
        raise UserError(f"{place}: no such folder. Name one with a run, a checkpoint or a model, such as runs/demo.")
    if not or_url:
        raise UserError(f"{spelled(place)}: a URL, and this reads a folder. Try `argosy checkpoint import` first.")
