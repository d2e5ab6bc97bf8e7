"""Flags, which dataclasses declare and check, and the parser of the command line."""

import argparse
import operator
import re
import sys
import tempfile
from collections.abc import Collection, Iterable, Sequence
from dataclasses import field, fields
from functools import partial
from typing import Any, NoReturn

from common.console import UserError, suggest

MAX_SHARED = 1000  # characters; upper bound on the shared flags of a run
# Flags that are safe to paste into a shell: each has one value or none, and no value is an absolute path.
SHARED_FLAGS = re.compile(r"(--[a-z0-9_]+( [A-Za-z0-9_.,:+][A-Za-z0-9_.,:/+-]*)?( (?=-)|$))*", re.ASCII)
USERNAME = r"[\w.-]{1,32}"
BOUNDS = {"ge": (operator.ge, "at least"), "gt": (operator.gt, "above")}
BOUNDS |= {"le": (operator.le, "at most"), "lt": (operator.lt, "below")}


class Help(str):
    """A flag's help text that carries its rules: HfArgumentParser allows no other mark in a field's metadata."""


def flag(
    default: Any,
    help: str,
    *,
    aliases: Sequence[str] = (),
    shared: bool = False,
    may_be_empty: bool = False,
    requires: str | Sequence[str] = (),
    excludes: str | Sequence[str] = (),
    **bounds: float | str,
) -> Any:
    """Return a dataclass's field for HfArgumentParser, with rules that FlagGroup applies.

    :param default: the default value, or MISSING for a required flag
    :param shared: whether all peers of a run must use the same value, which they compare
    :param may_be_empty: whether this list may have no value
    :param requires: a flag that this one needs, which may show a value: "repo_url ORG/NAME"; of several, any
    :param excludes: flags that cannot be set at the same time
    :param bounds: ge, gt, le or lt of BOUNDS: a number, or the name of another flag
    """
    if shared:
        help += " Must match on all peers."
    if aliases:
        help += f" Also known as {', '.join(aliases)}."
    text = Help(help)
    text.is_shared = shared
    text.may_be_empty = may_be_empty
    text.bounds = bounds
    text.requires, text.excludes = ([it] if isinstance(it, str) else [*it] for it in (requires, excludes))
    default = {"default_factory": default.copy} if isinstance(default, list) else {"default": default}
    return field(**default, metadata={"help": text, "aliases": [*aliases]})


class FlagGroup:
    """The base of dataclasses of flags. A new instance that breaks a rule of its flags raises a UserError."""

    def __post_init__(self):
        for item in fields(self):
            name = item.name
            value = getattr(self, item.name)
            rules = item.metadata["help"]
            for bound, limit in rules.bounds.items() if isinstance(value, int | float) else ():
                is_inside, words = BOUNDS[bound]
                other = getattr(self, limit) if isinstance(limit, str) else limit
                if other is not None and not is_inside(value, other):
                    shown = f"--{limit} {other:g}" if isinstance(limit, str) else f"{limit:.10g}"
                    raise UserError(f"--{name} {value:g} must be {words} {shown}")
            if not value or value == item.default:
                continue
            if rules.requires and not any(getattr(self, needed.split()[0]) for needed in rules.requires):
                needed = " or ".join(f"--{needed}" for needed in rules.requires)
                raise UserError(f"--{name} needs {needed}: add {'it' if len(rules.requires) == 1 else 'one of them'}")
            for other in rules.excludes:
                if getattr(self, other):
                    raise UserError(f"--{name} and --{other} are mutually exclusive: give one of them")


def check_username(name: str | None) -> None:
    """Raise a UserError if --username is set and not a valid name."""
    if name is not None and not re.fullmatch(USERNAME, name):
        raise UserError(
            f"--username {name!r} is not a name: give up to 32 letters, digits, points, hyphens, underscores"
        )


def list_values(groups: Iterable[Any]) -> dict[str, Any]:
    """Return the values of all flags in these instances by name."""
    return {name: value for group in groups for name, value in vars(group).items()}


def find_typed(groups: Iterable[type]) -> set[str]:
    """Return the names of the flags on the command line, also of those set to their default."""
    words = {word.split("=")[0].strip("-").replace("-", "_") for word in sys.argv[1:] if word.startswith("--")}
    return {
        item.name
        for group in groups
        for item in fields(group)
        if words & {item.name, f"no_{item.name}", *(alias.strip("-") for alias in item.metadata["aliases"])}
    }


def describe_shared(groups: Sequence[Any], typed: Collection[str] = ()) -> str:
    """Return the shared flags that are in `typed` or differ from their defaults, as they are typed."""
    words = []
    for group in groups:
        names = [name for name in list_shared([type(group)]) if name != "experiment_prefix"]
        usual = type(group)() if names else None
        for name in names:
            value = getattr(group, name)
            if value is None:  # another flag replaces it
                continue
            text = f"--{name}" if value is True else f"--{name} {value}"
            fits = sum(map(len, words)) + len(words) + len(text) <= MAX_SHARED
            is_told = name in typed or value != getattr(usual, name)
            if is_told and fits and SHARED_FLAGS.fullmatch(text):
                words.append(text)
    return " ".join(words)


class UnknownFlagError(ValueError):
    """Flags of another peer that this version of the code does not share."""


def list_shared(groups: Iterable[type]) -> list[str]:
    """Return the names of the flags that must match on all peers."""
    return [item.name for group in groups for item in fields(group) if item.metadata["help"].is_shared]


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """A help formatter that keeps the description's lines, and shows no value for flags that need none."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        names = ", ".join(action.option_strings)
        return names if action.nargs in (0, "?") else f"{names} {self._format_args(action, '')}"


def parse_flags(
    groups: Sequence[type], basic: Collection[str], description: str | None, before: Sequence[str] = ()
) -> tuple:
    """Parse the command line into one instance of each dataclass, in order.

    :param basic: names of the flags that --help lists if there are many; --help_all lists all
    :param before: arguments in front of the command line, which overrides them
    :raises UserError: if a flag is unknown, abbreviated, malformed or contradicts another one
    """
    try:
        tempfile.gettempdir()
    except OSError as e:  # libraries need a temporary folder when they are imported
        raise UserError("the disk is full or read-only: free some space (df -h), or set TMPDIR") from e
    from transformers import HfArgumentParser  # a slow import, see `flag`

    for group in groups:  # HfArgumentParser reads the title from this attribute
        group._argument_group_name = group.__doc__.split(". ")[0].rstrip(".")
    declared = {item.name for group in groups for item in fields(group)}
    looks = {"description": description, "formatter_class": partial(HelpFormatter, max_help_position=8)}
    parser = HfArgumentParser(groups, allow_abbrev=False, **looks)
    is_short = len(declared) > 40 and "--help_all" not in sys.argv
    rest = f"the other {len(declared - basic)} flags too" if is_short else "every flag"
    parser.add_argument("--help_all", action="help", help=f"List {rest}. Flags may be written with - for _.")
    required = "".join(f" --{action.dest} VALUE" for action in parser._actions if action.required)
    parser.usage = f"%(prog)s{required} [--FLAG VALUE ...]"
    for action in parser._actions:
        if action.dest in declared:
            if action.help.may_be_empty:
                action.nargs = "*"
            describe_flag(action, is_shown=action.dest in basic or not is_short)

    def refuse(message: str) -> NoReturn:
        raise UserError(f"{message} (--help_all lists every flag)")

    # argparse would print its usage before an error, a screen full of flags
    parser.error = refuse
    # check this before argparse reports a missing flag, which may be the misspelled one
    for name in [word.split("=")[0] for word in sys.argv[1:] if word.startswith("--") and " " not in word]:
        if name not in parser._option_string_actions:
            known = [other for other in parser._option_string_actions if "-" not in other[2:]]
            refuse(f"unknown argument {name}{suggest(name[2:].replace('-', '_'), known)}")
    *parsed, unknown = parser.parse_args_into_dataclasses([*before, *sys.argv[1:]], return_remaining_strings=True)
    if unknown:
        refuse(f"unknown argument {unknown[0]}")
    return tuple(parsed)


def describe_flag(action: argparse.Action, is_shown: bool) -> None:
    """Set a flag's text in help and errors: one spelling, a placeholder for its value, and its default."""
    # the parser's own table keeps the other spellings
    action.option_strings = action.option_strings[:1]
    if action.default is True:
        action.option_strings.append(f"--no_{action.dest}")
    if action.choices is None:
        action.metavar = {int: "N", float: "X"}.get(action.type, "VALUE")
    if action.required:
        action.help += " (required)"
    elif action.default not in (None, "", []) and action.default is not False:
        default = " ".join(action.default) if isinstance(action.default, list) else action.default
        action.help += f" (default: {'on' if default is True else default})"
    if not is_shown or action.const is False:  # --no_X is listed with --X
        action.help = argparse.SUPPRESS
