"""The command line of one command: its own options, and every key of the run as one more.

tyro parses and prints the help; the values of keys go to `argosy.config` as they were typed, so that a file
and the command line are checked by the same rules and answered in the same words.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import field, fields, make_dataclass
from functools import reduce
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import tyro
from pydantic.fields import FieldInfo

from argosy.cli.help import ALL, OTHERS, SHORT, described, explained, no_hint
from argosy.config import keys
from argosy.config.counts import IS_COUNT, count_of
from argosy.config.essential import ESSENTIAL
from argosy.config.layers import Setting, Source
from argosy.config.load import OPTION_MARK, build, load, origin_of
from argosy.config.renamed import RENAMED, new_key
from argosy.config.schema import RunConfig
from argosy.config.section import Section, meanings
from argosy.config.suggest import suggestion
from argosy.errors import UserError

ExtraT = TypeVar("ExtraT")
SectionT = TypeVar("SectionT", bound=Section)

RUN = " [RUN]"
NONE = "none"
"""The word on the command line for a key that TOML would leave out."""


def parse_run(
    argv: list[str], prog: str, extra: type[ExtraT], about: str | None = None, idle: Collection[str] = ()
) -> tuple[ExtraT, RunConfig]:
    """`[RUN] [--section.key value ...]`: the command's own options and the resolved run.

    extra: a dataclass of the command's options (all with defaults, documented by docstrings).
    about: the description in --help, in place of the docstring of the module that defines `extra`. Of the keys, --help
        shows those of `config.essential` but the `idle` ones, which have no effect on this command, and --help-all
        shows all; both show the run's values in force.
    Raises: UserError for what is wrong in file or options; SystemExit after --help, or if tyro refuses.
    """
    source, rest = (argv[0], argv[1:]) if argv and not argv[0].startswith("-") else (None, argv)
    run, about = load(source), about or _description(extra)
    if any(word in SHORT for word in rest):
        _show_essential(prog + RUN, extra, run, about, [key for key in ESSENTIAL if keys.dotted(key) not in idle])
    options, overrides = _parse(_helped(rest), prog + RUN, extra, run, about)
    return options, load(source, overrides, overrides_mark=OPTION_MARK)


def origin(argv: list[str], key: str) -> str:
    """Return where `key` has its value from if `argv` are the words of `parse_run`: an option, a line, or nowhere."""
    source = argv[0] if argv and not argv[0].startswith("-") else None
    words = (word.removeprefix(OPTION_MARK).split("=")[0] for word in argv if word.startswith(OPTION_MARK))
    return origin_of(source, key, {keys.dotted(keys.key_of(word)) for word in words})


def parse_section(argv: list[str], prog: str, extra: type[ExtraT], section: type[SectionT]) -> tuple[ExtraT, SectionT]:
    """Like `parse_run`, for a command whose options are one section: its keys stand without a prefix.

    A field of `section` may be `tyro.conf.Positional`. Paths are left as typed.
    """
    options, overrides = _parse(_helped(argv), prog, extra, section(), _description(extra))
    source = Source(OPTION_MARK)
    return options, build(section, {keys.key_of(k): Setting(v, source) for k, v in overrides.items()})


def parse(argv: list[str], prog: str, options: type[ExtraT], about: str | None = None) -> ExtraT:
    """Parse the options of a command that takes no run into a dataclass. Raises: as `parse_run`.

    about: the description in --help, in place of the docstring of the module that defines `options`.
    """
    found: ExtraT
    unknown: list[str]
    argv = _helped(argv)
    form = explained(options) if any(word in SHORT for word in argv) else options
    argv = _with_plain_counts(argv, options)
    found, unknown = described(form, prog, about or _description(options), argv)
    _refuse(unknown, prog, options, Section)
    return found


def _helped(argv: list[str]) -> list[str]:
    """Return the words with --help in place of --help-all, which shows all where --help would show a part."""
    return ["--help" if word == ALL else word for word in argv]


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
    return IS_COUNT in getattr(kind, "__metadata__", ()) or any(_is_count(inner) for inner in get_args(kind))


def _name(word: str) -> str:
    return word.removeprefix(OPTION_MARK).replace("-", "_") if word.startswith(OPTION_MARK) else ""


def _plain(option: str, value: str) -> str:
    try:
        return str(count_of(value))
    except ValueError as error:
        raise UserError(f"{option} {value}: {error}.") from None


def _show_essential(prog: str, extra: type, run: RunConfig, about: str, shown: Sequence[keys.Key]) -> None:
    """Print the help with the command's own options and these keys of the run. Raises: SystemExit."""
    parts: list[tuple[str, Any, Any]] = []
    for key in shown:
        section: Section = reduce(getattr, map(str, key[:-1]), run)
        name, schema = str(key[-1]), type(section)
        value, option = getattr(section, name), keys.dotted(key).replace("_", "-")
        leaf = _leaf(schema.model_fields[name], value, meanings(schema)[name], option)
        parts.append(("_".join(map(str, key)), leaf, field(default=_words(value))))
    described(_side_by_side(explained(extra), make_dataclass("Keys", parts)), prog, f"{about}\n\n{OTHERS}", ["--help"])


def _parse(
    argv: list[str], prog: str, extra: type[ExtraT], config: Section, about: str
) -> tuple[ExtraT, dict[str, object]]:
    """The command's options, and the keys of `config` that the command line changes: dotted key -> value."""
    shown = any(word in SHORT for word in argv)
    form = _form(config, shown)
    argv = _by_new_names(argv)
    both = _side_by_side(explained(extra) if shown else extra, type(form))
    found: Any
    unknown: list[str]
    found, unknown = described(both, prog, about, argv)
    _refuse(unknown, prog, extra, type(config))
    typed = {keys.key_of(word[2:].split("=")[0]) for word in argv if word.startswith("--")}
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
    typed = {word: keys.key_of(word[len(OPTION_MARK) :].split("=")[0]) for word in argv if word.startswith(OPTION_MARK)}

    def named(word: str) -> str:
        if typed.get(word) not in RENAMED:
            return word
        new = OPTION_MARK + keys.dotted(new_key(typed[word], OPTION_MARK, typed.values()))
        return "=".join([new, *word.split("=", 1)[1:]])

    return [named(word) for word in argv]


def _description(options: type) -> str:
    return (sys.modules[options.__module__].__doc__ or "").strip()


def _refuse(unknown: list[str], prog: str, extra: Any, schema: type[Section]) -> None:
    """Raise one UserError for all words that no option takes."""
    hidden = {key for key, info in keys.fields(schema).items() if tyro.conf.Suppress in info.metadata}
    known = {(f.name,) for f in fields(extra)} | (keys.fields(schema).keys() - hidden)
    lines = []
    for name in (word.split("=")[0] for word in unknown if word.startswith("-")):
        key = keys.key_of(name.lstrip("-"))
        hint = "set it in the run file." if key in hidden else suggestion(key, known, mark=OPTION_MARK)
        lines.append(f"{name}: {'no' if key in hidden else 'unknown'} option; {hint}")
    if unknown and not lines:
        order = ", and RUN comes first" if prog.endswith(RUN) else ""
        lines = [f"{' '.join(unknown)}: unexpected; options begin with --{order}."]
    if lines:
        all_options = f"{prog.removesuffix(RUN)} {ALL if prog.endswith(RUN) else '--help'}"
        raise UserError("\n".join([*lines, f"  All options: {all_options}"]))


# A form is a section as the command line sees it: a dataclass of the same shape whose leaves are words.


def _form(config: Section, shown: bool) -> Any:
    """The form of `config`, with its values as defaults and, if it is to be shown, the meaning of each."""
    meaning = meanings(type(config)) if shown else {}
    parts: list[tuple[str, Any, Any]] = []
    for name, info in type(config).model_fields.items():
        value = getattr(config, name)
        if isinstance(value, Section):
            inner = _form(value, shown)
            about = tyro.conf.arg(help=type(value).__doc__)
            parts.append((name, Annotated[type(inner), about], field(default=inner)))
        elif tyro.conf.Suppress not in info.metadata:
            parts.append((name, _leaf(info, value, meaning.get(name)), field(default=_words(value))))
    form = make_dataclass(type(config).__name__, parts, frozen=True)
    form.__doc__ = type(config).__doc__
    return form()


def _leaf(info: FieldInfo, value: object, meaning: str | None, name: str | None = None) -> Any:
    """The form's type for one key: words, with the metavar and the help of the schema; name: if not the field's."""
    kind = keys.value_type(info)
    shape: Any = {tuple: tuple[str, ...], dict: tuple[tuple[str, str], ...]}.get(get_origin(kind), str)
    marks = [m for m in info.metadata if m in (tyro.conf.Positional, tyro.conf.UseAppendAction)]
    is_repeated = tyro.conf.UseAppendAction in marks
    about = tyro.conf.arg(
        name=name,
        help=meaning and " ".join(meaning.split()),
        help_behavior_hint=f"(default: {' '.join(_words(value))})" if is_repeated else no_hint(value),
        metavar=_metavar(kind).removesuffix(" ...") if is_repeated else _metavar(kind),
    )
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


def _changes(before: Any, after: Any, config: Section, typed: Collection[keys.Key], above: keys.Key = ()) -> Any:
    """Yield (dotted key, value) for each leaf of the form that was typed (positional: that has changed)."""
    for name, info in type(config).model_fields.items():
        value = getattr(config, name)
        old, new = getattr(before, name, None), getattr(after, name, None)
        if isinstance(value, Section):
            yield from _changes(old, new, value, typed, (*above, name))
        elif old != new or (*above, name) in typed:
            appended = len(_words(value)) if tyro.conf.UseAppendAction in info.metadata else 0  # tyro keeps the default
            yield keys.dotted((*above, name)), _meaning(new[appended:] if appended and new else new, info)


def _meaning(words: Any, info: FieldInfo) -> object:
    """Return the value that typed words mean; words without meaning stay words, for the schema to refuse."""
    kind = keys.value_type(info)
    if words == NONE and type(None) in get_args(info.annotation):
        return None
    if get_origin(kind) is dict:
        return {key: _number(weight) for key, weight in words}
    return _number(words) if kind in (int, float, bool) else words


def _number(word: str) -> object:
    for kind in (int, float, count_of):
        try:
            return kind(word)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(word.lower(), word)


def must_be_folder(path: Path) -> None:
    """Raise UserError unless `path` is a folder: before torch is imported, which takes seconds."""
    if not path.is_dir():
        raise UserError(f"{path}: no such folder.")
