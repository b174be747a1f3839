"""The rooms of docs/architecture.md are so: who imports whom, and how large things are."""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.house import ROOT, complexity, functions, lines, parameters, product, public

DOCUMENT = (ROOT / "docs" / "architecture.md").read_text()
ROOMS = [path for path in product() if path.parts[-2] != "deploy"]  # that stands outside
MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in ROOMS}


def layers() -> dict[str, int]:
    """Return the number of the layer of every file and folder in the table."""
    table = DOCUMENT.partition("| | rooms |")[2].partition("\n\n")[0].splitlines()[2:]
    cells = [row.strip("| ").split(" | ") for row in table]
    return {room: int(number) for number, rooms, _ in cells for room in rooms.split(", ")}


def layer(module: str) -> int:
    folder, _, rest = module.partition(".")
    return layers()[f"{folder}/" if rest else f"{folder}.py"]


def imported(module: str) -> set[str]:
    """Return the modules of ours that `module` imports, also inside of functions."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found & MODULES.keys()


def test_every_room_is_in_the_table() -> None:
    tops = {path.relative_to(ROOT).parts[0] for path in ROOMS}
    assert {name if name.endswith(".py") else f"{name}/" for name in tops} == layers().keys()


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_downwards(module: str) -> None:
    folder = module.partition(".")[0]
    elsewhere = {name for name in imported(module) if name.partition(".")[0] != folder}
    assert not [name for name in elsewhere if layer(name) <= layer(module)]


def test_no_imports_go_in_a_circle() -> None:
    tuple(TopologicalSorter({module: imported(module) for module in MODULES}).static_order())


def test_the_model_side_is_imported_by_the_server_alone() -> None:
    users = {
        module
        for module in MODULES
        if any(name.startswith("inference.") for name in imported(module))
    }
    assert {module for module in users if not module.startswith("inference.")} == {"server"}


def test_the_port_is_open_before_torch_is_imported() -> None:
    code = "import server, sys; print({'torch', 'transformers'} & sys.modules.keys())"
    command = [sys.executable, "-c", code]
    told = subprocess.run(command, cwd=ROOT, check=True, timeout=60, capture_output=True, text=True)
    assert told.stdout.strip() == "set()"


@pytest.mark.parametrize("path", product(), ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_can_be_read_at_a_glance(path: Path) -> None:
    text = path.read_text()
    tree = ast.parse(text)
    found = list(functions(tree))
    assert text.count("\n") <= 250
    for each in found:
        assert lines(each) <= 40, each.name
        assert len(parameters(each)) <= 6, each.name
        assert complexity(each) <= 8, each.name
    assert not [each.name for each in public(tree) if not ast.get_docstring(each)]
    assert ast.get_docstring(tree)
