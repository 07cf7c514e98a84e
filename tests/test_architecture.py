"""The house's rules that no type checker sees: fences, sizes, docstrings, and names that must agree."""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from moesim.policies.registry import EVICTIONS, PREDICTORS, Eviction, Predictor, eviction_names, predictor_names

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "moesim").rglob("*.py"))
PROFILER = sorted((ROOT / "profiler").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
# Compiled loops cannot be cut at will: calls between kernels pass long lists of arrays.
MAX_KERNEL_LINES = 80
KERNEL_DECORATORS = {"kernel", "njit"}


def _functions(path: Path) -> Iterator[tuple[FunctionNode, bool]]:
    """Give every function of a file, and whether it is public: a caller outside can reach it by names alone."""

    def walk(node: ast.AST, is_public: bool) -> Iterator[tuple[FunctionNode, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, FunctionNode):
                yield child, is_public and not child.name.startswith("_")
                yield from walk(child, False)
            elif isinstance(child, ast.ClassDef):
                yield from walk(child, is_public and not child.name.startswith("_"))
            else:
                yield from walk(child, is_public)

    return walk(ast.parse(path.read_text(encoding="utf-8")), True)


def _n_lines(function: FunctionNode) -> int:
    """Count a function's lines without its docstring, which may be as long as it needs to be."""
    first = function.body[0]
    is_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    n_docstring = (first.end_lineno or first.lineno) - first.lineno + 1 if is_docstring else 0
    return (function.end_lineno or function.lineno) - function.lineno + 1 - n_docstring


def _is_kernel(function: FunctionNode) -> bool:
    """Tell whether a function is compiled."""
    return any(ast.unparse(decorator).split("(")[0] in KERNEL_DECORATORS for decorator in function.decorator_list)


def test_files_are_short() -> None:
    """No file has 400 lines."""
    files = SOURCES + PROFILER + TESTS
    sizes = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8").count("\n") for path in files}
    assert {name: size for name, size in sizes.items() if size >= MAX_FILE_LINES} == {}


def test_functions_are_short() -> None:
    """No function has 60 lines, no kernel 80."""
    long = {
        f"{path.relative_to(ROOT).as_posix()}:{function.name}": _n_lines(function)
        for path in SOURCES + PROFILER
        for function, _ in _functions(path)
        if _n_lines(function) >= (MAX_KERNEL_LINES if _is_kernel(function) else MAX_FUNCTION_LINES)
    }
    assert long == {}


def test_public_functions_and_modules_are_documented() -> None:
    """What can be imported says what it is for."""
    silent = [
        f"{path.relative_to(ROOT).as_posix()}:{function.name}"
        for path in SOURCES + PROFILER
        for function, is_public in _functions(path)
        if is_public and not ast.get_docstring(function)
    ]
    silent += [
        path.relative_to(ROOT).as_posix()
        for path in SOURCES + PROFILER
        if not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert silent == []


def _imported_names(path: Path) -> set[str]:
    """Give the top-level packages that a file imports anywhere, also inside functions."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.split(".")[0])
    return names


FENCES = {
    "torch": (),
    "transformers": (),
    "profiler": (),
    "libcachesim": (),
    "simpy": ("moesim/engine",),
    "numba": ("moesim/cache", "moesim/policies", "moesim/replay"),
    "matplotlib": ("moesim/plots", "moesim/report"),
}


@pytest.mark.parametrize(("package", "homes"), FENCES.items())
def test_packages_stay_behind_their_fences(package: str, homes: tuple[str, ...]) -> None:
    """Heavy packages are imported where they belong and nowhere else."""
    users = [path.relative_to(ROOT).as_posix() for path in SOURCES if package in _imported_names(path)]
    assert [user for user in users if not user.startswith(homes or ("-",))] == []


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("moesim.cli.main", "torch simpy numba matplotlib pandas pyarrow numpy"),
        ("moesim.scenario", "torch simpy numba matplotlib pandas pyarrow typer"),
        ("moesim.specs", "torch simpy numba matplotlib pandas pyarrow typer"),
        ("moesim.trace", "torch simpy numba matplotlib typer"),
        ("moesim.report", "torch simpy numba matplotlib typer"),
        ("moesim.plots", "torch simpy numba typer"),
        ("moesim.run", "torch matplotlib typer"),
    ],
)
def test_importing_loads_no_more_than_needed(module: str, forbidden: str) -> None:
    """A module does not pull a heavy package in through another one."""
    program = f"import sys, {module}; print([name for name in {forbidden.split()} if name in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert loaded.stdout.strip() == "[]"


def test_every_module_has_its_place_in_the_import_order() -> None:
    """No part of the package is left out of the layers that the import check knows."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    order = next(item for item in settings["tool"]["importlinter"]["contracts"] if item["type"] == "layers")
    placed = {name.strip() for layer in order["layers"] for name in layer.split("|")}
    parts = {
        f"moesim.{path.stem}"
        for path in (ROOT / "moesim").iterdir()
        if path.name != "__init__.py" and (path.suffix == ".py" or (path / "__init__.py").exists())
    }
    assert parts == placed


def _compared_with(name: str, path: Path) -> set[str]:
    """Give what a file compares a variable or attribute with: constants' values, else names in lower case."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Compare) and ast.unparse(node.left).split(".")[-1] == name:
            parts = [part for side in node.comparators for part in getattr(side, "elts", [side])]
            found |= {
                str(part.value) if isinstance(part, ast.Constant) else ast.unparse(part).lower() for part in parts
            }
    return found


def _check_dispatch(names: set[str], dispatched: set[str]) -> None:
    """Compare registered names with those that a dispatch compares; its last branch may serve one name unasked."""
    assert dispatched <= names
    assert len(names - dispatched) <= 1


def test_eviction_names_agree() -> None:
    """Registry, compiled dispatch and oracle know the same eviction policies."""
    names = set(eviction_names())
    assert {kind.name.lower() for kind in EVICTIONS} == names
    _check_dispatch(names, _compared_with("kind", ROOT / "moesim/policies/eviction.py"))
    assert _compared_with("name", ROOT / "tests/oracle_policies.py") == names
    assert sorted(Eviction) == list(range(len(Eviction)))


def test_predictor_names_agree() -> None:
    """Registry, compiled dispatch and oracle know the same predictors."""
    names = set(predictor_names())
    assert {kind.name.lower() for kind in PREDICTORS} == names
    _check_dispatch(names, _compared_with("predictor", ROOT / "moesim/policies/prefetch.py") | {"none"})
    assert _compared_with("predictor", ROOT / "tests/oracle_policies.py") | {"none"} == names
    assert sorted(Predictor) == list(range(len(Predictor)))
