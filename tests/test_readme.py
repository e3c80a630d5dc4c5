"""What README.md says is so."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import flags_table
import pytest

import jaxserve

TEXT = flags_table.README.read_text(encoding="utf-8")
PYTHON = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def test_flags_are_up_to_date() -> None:
    assert flags_table.replaced(TEXT) == TEXT, "run: python tools/flags_table.py --write"


def test_every_flag_is_listed_once() -> None:
    listed = re.findall(r"^\| `(?:--)?([\w-]+)", flags_table.table(), re.MULTILINE)
    assert {"MODEL", "block-size", "enable-prefix-caching", "port"} <= set(listed)
    assert len(listed) == len(set(listed))


def test_a_readme_without_a_place_for_flags_is_refused() -> None:
    with pytest.raises(ValueError, match="must hold"):
        flags_table.replaced("# Title\n")


@pytest.mark.parametrize("source", PYTHON)
def test_examples_use_names_that_exist(source: str) -> None:
    imports = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
    assert imports
    assert [
        alias.name
        for node in imports
        if node.module == "jaxserve"
        for alias in node.names
        if alias.name not in jaxserve.__all__
    ] == []


def test_linked_files_exist() -> None:
    links = [link for link in re.findall(r"\]\(([^)]+)\)", TEXT) if "://" not in link]
    assert links
    assert [link for link in links if not (Path(flags_table.README).parent / link).exists()] == []
