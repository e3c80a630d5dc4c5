"""Flags made from dataclasses: a field's name, annotation and metadata say all there is to say about its flag.

The same flags are read from a YAML file, where the command line wins. Nothing has a default here: what neither names is
left to the dataclass.
"""

from __future__ import annotations

import argparse
import re
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from decimal import Decimal
from typing import Any, NoReturn

from jaxserve.errors import ConfigError, nearest

__all__ = ["Flag", "Parser", "add_flags", "flags_of", "parse_size", "read_yaml"]

_SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)([kKmMgGtT]?)")


def parse_size(text: str) -> int:
    """An integer, maybe with a suffix: 1k is 1000 and 1K is 1024, and so on for m, g, t. ValueError: it is none."""
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is no integer like 4096, 4k (thousands) or 4K (times 1024)")
    digits, suffix = match.groups()
    power = " kmgt".index(suffix.lower() or " ")
    value = Decimal(digits) * (1024 if suffix.isupper() else 1000) ** power
    if value != int(value):
        raise ValueError(f"{text!r} is not a whole number")
    return int(value)


@dataclass(frozen=True)
class Flag:
    """One field as a flag.

    Attributes:
        name: the field's name.
        kind: type of its value, or of each value if ``many``.
        many: it takes several values.
        human: integers may have a suffix.
        optional: null is a value.
        choices: legal values, if they are few.
        help: what it does, with its default.
    """

    name: str
    kind: type
    many: bool
    human: bool
    optional: bool
    choices: tuple[Any, ...] | None
    help: str

    @property
    def option(self) -> str:
        return "--" + self.name.replace("_", "-")

    def convert(self, text: str) -> Any:
        """The value in ``text``. ValueError: there is none."""
        if self.human:
            return parse_size(text)
        return self.kind(text)

    def check(self, value: Any) -> Any:
        """The value of this flag from a YAML file. ConfigError: it has another type."""
        if value is None and self.optional:
            return None
        if self.many:
            items = value if isinstance(value, list) else [value]
            return tuple(self._check_one(item) for item in items)
        return self._check_one(value)

    def _check_one(self, value: Any) -> Any:
        if self.human and isinstance(value, str):
            try:
                return parse_size(value)
            except ValueError as error:
                raise ConfigError(f"{self.name}: {error}.") from None
        if self.kind is float and type(value) is int:
            return float(value)
        if type(value) is not self.kind:
            raise ConfigError(f"{self.name} must be of type {self.kind.__name__}, got {value!r}.")
        return value


def flags_of(kind: type) -> list[Flag]:
    """The flags of a dataclass, in order."""
    hints = typing.get_type_hints(kind)
    return [_flag(f, hints[f.name]) for f in fields(kind)]


def _flag(source: Field[Any], hint: Any) -> Flag:
    optional = False
    if typing.get_origin(hint) is types.UnionType:
        (hint,) = (part for part in typing.get_args(hint) if part is not types.NoneType)
        optional = True
    many = typing.get_origin(hint) is tuple
    help = source.metadata.get("help", "")
    if source.default not in (None, (), MISSING):
        shown = {True: "on", False: "off"}[source.default] if hint is bool else source.default
        shown = " ".join(shown) if many else shown
        help = f"{help} (default: {shown})"
    return Flag(
        name=source.name,
        kind=typing.get_args(hint)[0] if many else hint,
        many=many,
        human=source.metadata.get("human", False),
        optional=optional,
        choices=source.metadata.get("choices"),
        help=help,
    )


def add_flags(parser: argparse.ArgumentParser, title: str, flags: Iterable[Flag]) -> None:
    """Add a group of flags; those not given leave no trace in the namespace."""
    group = parser.add_argument_group(title)
    for flag in flags:
        settings: dict[str, Any] = {"default": argparse.SUPPRESS, "help": flag.help.replace("%", "%%")}
        if flag.kind is bool:
            settings["action"] = argparse.BooleanOptionalAction
        else:
            settings["type"] = _converter(flag)
            settings["metavar"] = None if flag.choices else flag.kind.__name__.upper()
            settings["choices"] = flag.choices
            if flag.many:
                settings |= {"nargs": "+", "action": "extend"}
        group.add_argument(flag.option, dest=flag.name, **settings)


def _converter(flag: Flag) -> Any:
    def convert(text: str) -> Any:
        try:
            return flag.convert(text)
        except ValueError as error:
            reason = str(error) if flag.human else f"{text!r} is no {flag.kind.__name__}"
            raise argparse.ArgumentTypeError(reason) from None

    return convert


def read_yaml(path: str, flags: Iterable[Flag]) -> dict[str, Any]:
    """Values of flags from a YAML file of flat names, with dashes or underscores.

    ConfigError: the file cannot be read, or holds a name or a value that no flag takes.
    """
    import yaml

    try:
        with open(path, encoding="utf-8") as file:
            content = yaml.safe_load(file)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from None
    if not isinstance(content, Mapping | None):
        raise ConfigError(f"{path} must hold names and values, got {type(content).__name__}.")
    known = {flag.name: flag for flag in flags}
    values: dict[str, Any] = {}
    for key, value in (content or {}).items():
        name = str(key).replace("-", "_")
        if name not in known:
            raise ConfigError(f"{path}: unknown setting {str(key)!r}.{nearest(name, known)}")
        if name in values:
            raise ConfigError(f"{path}: {name} is set twice.")
        try:
            values[name] = known[name].check(value)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None
    return values


class Parser(argparse.ArgumentParser):
    """argparse with errors of one line, no abbreviations, and the nearest name for an unknown flag."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)

    def parse(self, argv: Sequence[str] | None) -> argparse.Namespace:
        """The arguments in ``argv`` (by default the process's own); wrong ones end the process with code 2."""
        parsed, unknown = self.parse_known_args(argv)
        if unknown:
            # A subcommand leaves what it does not know to its parent, so that it must be asked for its own flags.
            parser: Parser = getattr(parsed, "parser", self)
            name = unknown[0].partition("=")[0]
            kind = "flag" if name.startswith("-") else "argument"
            parser.error(f"unknown {kind} {name}.{nearest(name, parser._option_string_actions)}")
        return parsed

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")
