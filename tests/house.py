"""The figures of the house: how long its files and functions are, what is typed and documented.

    python -m tests.house [folder …]

Without folders, those of the product: all but tests, benchmarks, page and models.
"""

from __future__ import annotations

import ast
import statistics
import sys
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
APART = {"tests", "benchmarks", "models", "web"}
BRANCHES = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.match_case)
Function = ast.FunctionDef | ast.AsyncFunctionDef


def product() -> list[Path]:
    """Return the files of the product."""
    folders = {path: path.relative_to(ROOT).parts[0] for path in ROOT.rglob("*.py")}
    return sorted(path for path, top in folders.items() if top not in APART and top[0] != ".")


def functions(tree: ast.AST) -> Iterator[Function]:
    """Yield every function in `tree`, methods and inner ones too."""
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def public(tree: ast.AST) -> Iterator[Function]:
    """Yield every function in `tree` that others may call: with no underscore, in no function."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, Function):
            yield from public(node)
        elif not node.name.startswith("_"):
            yield node


def lines(node: Function | ast.stmt) -> int:
    """Return how many lines it has, decorators aside."""
    return (node.end_lineno or node.lineno) - node.lineno + 1


def complexity(function: Function) -> int:
    """Return the number of ways through it (McCabe's)."""
    return 1 + sum(isinstance(node, BRANCHES) for node in ast.walk(function))


def parameters(function: Function) -> list[ast.arg]:
    """Return its parameters, `self` and `cls` aside."""
    given = function.args
    every = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
    return [each for each in every if each and each.arg not in ("self", "cls")]


def docstrings(tree: ast.Module) -> Iterator[ast.stmt]:
    """Yield every docstring in `tree`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | Function) and ast.get_docstring(node):
            yield node.body[0]


def comments(path: Path) -> int:
    """Return how many lines are a comment and nothing else."""
    with path.open("rb") as file:
        found = [each for each in tokenize.tokenize(file.readline) if each.type == tokenize.COMMENT]
    return sum(each.line.lstrip().startswith("#") for each in found)


def figures(paths: Sequence[Path]) -> Mapping[str, str]:
    """Return the figures of the files at `paths`, by name."""
    sizes = [path.read_text(encoding="utf-8").count("\n") for path in paths]
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in paths]
    found = [each for tree in trees for each in functions(tree)]
    offered = [each for tree in trees for each in public(tree)]
    lengths = sorted(map(lines, found))
    given = [parameter for each in found for parameter in parameters(each)]
    documented = sum(ast.get_docstring(each) is not None for each in offered)
    typed = sum(each.annotation is not None for each in given)
    returning = sum(each.returns is not None for each in found)
    told = sum(lines(each) for tree in trees for each in docstrings(tree))
    middle, p90 = statistics.median(lengths), lengths[int(0.9 * len(lengths))]
    return {
        "files / lines": f"{len(paths)} / {sum(sizes):,}",
        "median / largest file": f"{statistics.median(sizes):.0f} / {max(sizes)}",
        "function median / p90 / longest": f"{middle:.0f} / {p90} / {lengths[-1]}",
        "functions > 50 lines": f"{sum(each > 50 for each in lengths)} of {len(found)}",
        "most ways through a function": f"{max(map(complexity, found))}",
        "most parameters": f"{max(len(parameters(each)) for each in found)}",
        "comment lines": f"{sum(map(comments, paths)) / sum(sizes):.1%}",
        "docstring lines": f"{told / sum(sizes):.1%}",
        "public functions documented": f"{documented / len(offered):.0%}",
        "arguments / returns typed": f"{typed / len(given):.0%} / {returning / len(found):.0%}",
    }


if __name__ == "__main__":
    paths = [path for folder in sys.argv[1:] for path in sorted(Path(folder).rglob("*.py"))]
    for name, value in figures(paths or product()).items():
        sys.stdout.write(f"{name:32} {value}\n")
