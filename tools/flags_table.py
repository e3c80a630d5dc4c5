#!/usr/bin/env python3
"""The table of command line flags in README.md, made from the configuration's dataclasses.

python tools/flags_table.py            # print it
python tools/flags_table.py --write    # put it into README.md
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from jaxserve.cli.arguments import Flag, flags_of
from jaxserve.config import EngineConfig, ServerConfig

__all__ = ["README", "main", "replaced", "table"]

README = Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- flags: made by tools/flags_table.py -->", "<!-- end of flags -->"


def table() -> str:
    """A table per part of the configuration, as Markdown."""
    parts: list[Any] = [*(part.default_factory for part in fields(EngineConfig)), ServerConfig]
    return "\n\n".join("\n".join(_part(part)) for part in parts)


def _part(part: Any) -> Iterator[str]:
    yield f"| {part.title} | |"
    yield "|---|---|"
    for flag in flags_of(part):
        yield f"| {_usage(flag)} | {_cell(flag.help)}{_choices(flag)} |"


def _usage(flag: Flag) -> str:
    if flag.name == "model":
        return "`MODEL`"
    if flag.kind is bool:
        return f"`{flag.option}`, `--no-{flag.option[2:]}`"
    value = "VALUE" if flag.choices else flag.kind.__name__.upper()
    return f"`{flag.option} {value}{' ...' if flag.many else ''}`"


def _choices(flag: Flag) -> str:
    return f" One of {', '.join(f'`{choice}`' for choice in flag.choices)}." if flag.choices else ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def replaced(readme: str) -> str:
    """The text of README.md with a fresh table. ValueError: it has no place for one."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"README.md must hold the lines {BEGIN!r} and {END!r}.")
    return f"{before}{begin}\n\n{table()}\n\n{end}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the table into README.md")
    if parser.parse_args().write:
        README.write_text(replaced(README.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(table())


if __name__ == "__main__":
    main()
