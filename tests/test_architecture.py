"""The shape of the code: which room imports which, and how large things may grow.

Everything is read with ``ast``, so that imports inside functions and under ``TYPE_CHECKING`` count, and nothing is run.
To change a rule, change its table: a row of ``ROOMS`` for the order, a row of ``BUDGET_EXCEPTIONS`` for a size.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("jaxserve", "pallas_kernels")


class Room(NamedTuple):
    """Where a module stands: it imports lower ranks only, and of those only sides that its own side sees."""

    side: str
    rank: int


ROOMS = {
    # Ground floor: importable by all; each may import only those before it.
    "jaxserve.errors": Room("ground", 0),
    "jaxserve.logging": Room("ground", 1),
    "jaxserve.timings": Room("ground", 1),
    "jaxserve.settings": Room("ground", 2),
    "jaxserve.http_config": Room("ground", 3),
    "jaxserve.config": Room("ground", 4),
    "jaxserve.sampling_params": Room("ground", 5),
    "jaxserve.plan": Room("ground", 6),
    "jaxserve.request": Room("ground", 7),
    "jaxserve.outputs": Room("ground", 8),
    # What a model is, as plain data; the other modules of the room are device code.
    "jaxserve.models.config": Room("ground", 9),
    "jaxserve.models.spec": Room("ground", 9),
    # Device side.
    "pallas_kernels": Room("kernels", 10),
    "jaxserve.sharding": Room("device", 11),
    # What layers and programs take of adapters; the rest of the room reads them as checkpoints are read.
    "jaxserve.lora.layout": Room("device", 12),
    "jaxserve.lora.bank": Room("device", 13),
    "jaxserve.quantization": Room("device", 12),
    "jaxserve.layers": Room("device", 14),
    "jaxserve.models": Room("device", 15),
    "jaxserve.sampling": Room("device", 15),
    "jaxserve.weights": Room("device", 16),
    "jaxserve.lora": Room("device", 17),
    "jaxserve.speculative": Room("device", 17),
    "jaxserve.runner": Room("device", 18),
    # Host side.
    "jaxserve.blocks": Room("host", 11),
    "jaxserve.scheduler": Room("host", 12),
    "jaxserve.structured": Room("host", 12),
    "jaxserve.tokenizer": Room("host", 12),
    "jaxserve.metrics": Room("host", 12),
    "jaxserve.roofline": Room("host", 12),
    "jaxserve.live": Room("host", 13),
    # Both sides meet here.
    "jaxserve.engine": Room("engine", 20),
    "jaxserve.training": Room("training", 21),
    "jaxserve.server": Room("front", 21),
    "jaxserve.bench": Room("front", 21),
    "jaxserve.cli": Room("front", 22),
    "jaxserve": Room("front", 23),
    "jaxserve.__main__": Room("front", 24),
}

SEES = {
    "ground": {"ground"},
    "kernels": set[str](),
    "device": {"ground", "kernels", "device"},
    "host": {"ground", "host"},
    "engine": {"ground", "host", "device"},
    "training": {"ground", "host", "engine", "device"},
    "front": {"ground", "host", "engine", "training", "front"},
}

# (importing module or room, imported module or room) -> reason.
IMPORT_EXCEPTIONS = {
    ("jaxserve.cli", "jaxserve"): "the version",
    ("jaxserve.server", "jaxserve"): "the version",
    ("jaxserve.engine.startup", "jax"): "makes the device side: which device, which dtype, waiting for the weights",
    ("jaxserve.engine.startup", "pallas_kernels"): "chooses backends before anything is loaded",
    ("jaxserve.engine.loading", "jax"): "which device the weights are for",
    ("jaxserve.engine.loading", "pallas_kernels"): "chooses backends before anything is loaded",
}

JAX = {"jax", "jaxlib", "flax", "orbax", "optax"}

FILE_LINES = 350
FUNCTION_LINES = 60
KERNEL_LINES = 120
CONSTRUCTOR_PARAMETERS = 8

# "file", "file::function" or "file::Class(parameters)" -> (limit, reason).
BUDGET_EXCEPTIONS: dict[str, tuple[int, str]] = {}


@dataclass(frozen=True)
class Module:
    """One source file: ``name`` is dotted, of a package that of its folder."""

    name: str
    path: str
    source: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source)

    @property
    def is_package(self) -> bool:
        return self.path.endswith("__init__.py")

    @property
    def room(self) -> str | None:
        """Key in ROOMS: the longest that the name starts with. The root stands for itself only."""
        return max((room for room in ROOMS if within(self.name, room)), key=len, default=None)

    def imports(self, known: dict[str, Module]) -> set[str]:
        """Dotted names of imported modules; ``from package import module`` names the module."""
        found: set[str] = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    up = self.name.split(".")
                    up = up[: len(up) - node.level + self.is_package]
                    base = ".".join([*up, base] if base else up)
                for alias in node.names:
                    inner = f"{base}.{alias.name}"
                    found.add(inner if inner in known else base)
        return found


def within(name: str, prefix: str) -> bool:
    """Whether a module is ``prefix`` or in it; the root package stands for itself only."""
    return name == prefix or (name.startswith(f"{prefix}.") and prefix != "jaxserve")


def excepted(importer: str, imported: str) -> bool:
    return any(within(importer, a) and within(imported, b) for a, b in IMPORT_EXCEPTIONS)


def load(root: Path) -> dict[str, Module]:
    modules: dict[str, Module] = {}
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            relative = path.relative_to(root)
            parts = relative.with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            modules[name] = Module(name, relative.as_posix(), path.read_text(encoding="utf-8"))
    return modules


def top(name: str) -> str:
    return name.split(".", 1)[0]


def order_violations(modules: dict[str, Module]) -> list[str]:
    """Modules without a room, and imports against the order."""
    wrong: list[str] = []
    for module in modules.values():
        if module.room is None:
            wrong.append(f"{module.path} has no row in ROOMS")
            continue
        own = ROOMS[module.room]
        for name in sorted(n for n in module.imports(modules) if top(n) in PACKAGES):
            if name not in modules:
                wrong.append(f"{module.path} imports {name}, which does not exist")
                continue
            room = modules[name].room
            if room is None or room == module.room or excepted(module.name, name):
                continue
            other = ROOMS[room]
            if other.side not in SEES[own.side] or other.rank >= own.rank:
                wrong.append(f"{module.path} imports {name}: {module.room} {own[:]} may not import {room} {other[:]}")
    return wrong


def ways_to_jax(start: Module, modules: dict[str, Module]) -> Iterator[str]:
    """Chains of imports from a module to jax.

    Importing a module of another package runs that package, so it counts too; but for the root, whose public names are
    for users.
    """
    todo, seen = [(start.name, start.path)], {start.name, "jaxserve"}
    while todo:
        name, trail = todo.pop()
        imported = modules[name].imports(modules)
        around = {n.rsplit(".", 1)[0] for n in imported if n.count(".") > 1}
        for reached in sorted(imported | around):
            if top(reached) in JAX:
                yield f"{trail} -> {reached}"
            elif reached in modules and reached not in seen:
                seen.add(reached)
                todo.append((reached, f"{trail} -> {reached}"))


def jax_violations(modules: dict[str, Module]) -> list[str]:
    """Ground and host modules that reach jax in any way, and modules above them that import it themselves."""
    wrong: list[str] = []
    for module in modules.values():
        side = ROOMS[module.room].side if module.room else None
        if side in ("ground", "host"):
            wrong += ways_to_jax(module, modules)
        elif side in ("engine", "front"):
            found = sorted(n for n in module.imports(modules) if top(n) in JAX)
            wrong += [f"{module.path} -> {n}" for n in found if not excepted(module.name, n)]
    return wrong


def definitions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    """(qualified name, node) of all functions and classes."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield prefix + node.name, node
            yield from definitions(node, f"{prefix}{node.name}.")
        else:
            yield from definitions(node, prefix)


def sizes(module: Module) -> Iterator[tuple[str, int, int]]:
    """(what, size, limit) of everything in a module that has a budget."""
    yield module.path, module.source.count("\n"), FILE_LINES
    lines = KERNEL_LINES if top(module.name) == "pallas_kernels" else FUNCTION_LINES
    for name, node in definitions(module.tree):
        if isinstance(node, ast.ClassDef):
            continue
        assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        assert node.end_lineno is not None
        yield f"{module.path}::{name}", node.end_lineno - node.lineno + 1, lines
        if node.name == "__init__" and "." in name:
            count = len(node.args.posonlyargs + node.args.args + node.args.kwonlyargs) - 1
            yield f"{module.path}::{name.rsplit('.', 1)[0]}(parameters)", count, CONSTRUCTOR_PARAMETERS


def missing_parts(module: Module) -> list[str]:
    """What a module lacks of a docstring and ``__all__``; empty packages and ``__main__`` need none."""
    docstring = ast.get_docstring(module.tree)
    body = [n for n in module.tree.body if not (isinstance(n, ast.ImportFrom) and n.module == "__future__")]
    if (module.is_package and len(body) == (docstring is not None)) or module.path.endswith("__main__.py"):
        return []
    targets = [
        target
        for node in body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
    ]
    listed = any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets)
    return [part for part, there in (("docstring", docstring), ("__all__", listed)) if not there]


MODULES = load(ROOT)


def test_rooms_import_one_way() -> None:
    assert order_violations(MODULES) == []


def test_host_side_never_reaches_jax() -> None:
    assert jax_violations(MODULES) == []


@pytest.mark.parametrize(("importer", "imported"), IMPORT_EXCEPTIONS)
def test_import_exceptions_are_needed(importer: str, imported: str) -> None:
    importers = [module for module in MODULES.values() if within(module.name, importer)]
    assert any(within(name, imported) for module in importers for name in module.imports(MODULES))


def test_nothing_imports_torch() -> None:
    assert [m.path for m in MODULES.values() if any(top(n) == "torch" for n in m.imports(MODULES))] == []


def test_sizes_stay_within_budget() -> None:
    found = [entry for module in MODULES.values() for entry in sizes(module)]
    limits = {what: limit for what, (limit, _) in BUDGET_EXCEPTIONS.items()}
    over = [
        f"{what}: {size} > {limits.get(what, limit)}" for what, size, limit in found if size > limits.get(what, limit)
    ]
    assert over == []
    needed = {what for what, size, limit in found if size > limit}
    assert set(BUDGET_EXCEPTIONS) <= needed, "an exception that is no longer needed"
    assert all(reason for _, reason in BUDGET_EXCEPTIONS.values())


def test_modules_have_a_docstring_and_public_names() -> None:
    assert {module.path: gaps for module in MODULES.values() if (gaps := missing_parts(module))} == {}


def test_no_work_is_left_in_comments() -> None:
    pattern = re.compile(r"\b(TODO|FIXME|XXX)\b")
    assert [module.path for module in MODULES.values() if pattern.search(module.source)] == []


def modules_of(**sources: str) -> dict[str, Module]:
    """Modules from names with ``__`` for dots."""
    names = {key.replace("__", "."): source for key, source in sources.items()}
    return {n: Module(n, n.replace(".", "/") + ".py", source) for n, source in names.items()}


@pytest.mark.parametrize(
    ("name", "source", "message"),
    [
        ("jaxserve.scheduler.a", "from jaxserve.runner import b", "may not import jaxserve.runner"),
        ("jaxserve.scheduler.a", "def f():\n    import jaxserve.runner.b", "may not import jaxserve.runner"),
        ("jaxserve.scheduler.a", "from ..runner.b import x", "may not import jaxserve.runner"),
        ("jaxserve.runner.a", "import jaxserve.blocks.b", "may not import jaxserve.blocks"),
        ("jaxserve.layers.a", "import jaxserve.runner.b", "may not import jaxserve.runner"),
        ("jaxserve.errors", "import jaxserve.blocks.b", "may not import jaxserve.blocks"),
        ("pallas_kernels.a", "import jaxserve.errors", "may not import jaxserve.errors"),
        ("jaxserve.server.a", "import jaxserve.runner.b", "may not import jaxserve.runner"),
        ("jaxserve.engine.a", "import jaxserve.gone", "does not exist"),
        ("jaxserve.attic", "", "no row in ROOMS"),
    ],
)
def test_order_check_finds(name: str, source: str, message: str) -> None:
    modules = modules_of(jaxserve__runner__b="x = 1", jaxserve__blocks__b="", jaxserve__errors="")
    modules |= {name: Module(name, "a.py", source)}
    assert [message in line for line in order_violations(modules)] == [True]


def test_order_check_allows_the_way_down() -> None:
    source = "from jaxserve.runner import b\nfrom jaxserve import errors\nimport jaxserve.scheduler.c"
    modules = modules_of(
        jaxserve__engine__a=source, jaxserve__runner__b="", jaxserve__scheduler__c="", jaxserve__errors=""
    )
    assert order_violations(modules) == []


def test_jax_check_follows_our_own_imports_and_packages() -> None:
    modules = modules_of(
        jaxserve__blocks__a="from jaxserve.models.config import x",
        jaxserve__models__config="x = 1",
        jaxserve__engine__c="import jaxserve.models",
    )
    assert jax_violations(modules) == []
    modules["jaxserve.models"] = Module(
        "jaxserve.models", "jaxserve/models/__init__.py", "def f():\n    import jax.numpy"
    )
    assert len(jax_violations(modules)) == 1  # blocks.a; the engine may reach jax, but not import it
    modules |= modules_of(jaxserve__engine__c="import jax")
    assert len(jax_violations(modules)) == 2


def test_size_check_counts_functions_and_constructor_parameters() -> None:
    body = "\n".join(["        pass"] * 61)
    module = Module("jaxserve.a", "a.py", f"class A:\n    def __init__(self, a, b, *, c):\n{body}\n")
    assert list(sizes(module))[1:] == [("a.py::A.__init__", 62, 60), ("a.py::A(parameters)", 3, 8)]
