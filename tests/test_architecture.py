"""The map of docs/architecture.md holds: imports point one way, rooms form no cycle, and the page names what is there."""

import ast
import re
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"
#: A room may import those before it. `sparing/__init__.py` and `__main__.py` gather names and are held to nothing.
ORDER = (
    "version", "native", "spec", "from_json", "store", "notebook", "progress", "sample_text", "models", "documents", "draws", "mask",
    "call", "contract", "quarantine", "maths", "methods", "oracles", "layout", "packed", "check", "compiled", "functional", "index", "nn",
    "transformers", "workbench", "report", "cli",
)  # fmt: skip
LAB_ORDER = ("papers", "tasks", "training", "figure", "studies", "report", "cli")
#: Rooms that import inside functions: a command loads what it runs, and extras that it needs, when it runs.
LAZY = ("sparing.cli", "sparing_lab.cli")
#: What needs an optional dependency as soon as it is imported.
OPTIONAL = ("sparing.transformers",)


def module_name(path: Path) -> str:
    """Return the dotted name of a file below `SOURCE`."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.Module]:
    """Module name -> syntax tree, of both packages."""
    return {module_name(path): ast.parse(path.read_text()) for path in SOURCE.rglob("*.py")}


def imports(name: str, known: dict[str, ast.Module]) -> list[tuple[str, str]]:
    """(module of ours, "top" or "function") for each import of a module."""
    tree, found = known[name], []
    inside = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        targets = []
        if isinstance(node, ast.ImportFrom) and node.module:
            targets = [f"{node.module}.{each.name}" for each in node.names]
            targets = [each if each in known else node.module for each in targets]
        elif isinstance(node, ast.Import):
            targets = [each.name for each in node.names]
        where = "function" if id(node) in inside else "top"
        found += [(each, where) for each in targets if each.split(".")[0] in ("sparing", "sparing_lab")]
    return found


def room(name: str) -> tuple[str, str]:
    """(package, room) of a module."""
    package, _, rest = name.partition(".")
    return package, rest.split(".")[0]


def breaches(names: Iterable[str], known: dict[str, ast.Module]) -> list[str]:
    """Every import of these modules against the rule, in words."""
    found = []
    for name in names:
        package, own = room(name)
        if own in ("", "__main__"):
            continue
        for target, where in imports(name, known):
            of, other = room(target)
            if where == "function" and not name.startswith(LAZY) and not target.startswith(OPTIONAL):
                found.append(f"{name} imports {target} inside a function")
            if package == "sparing" and of == "sparing_lab":
                found.append(f"{name} imports {target}: the product does not know the laboratory")
            if of != package or other in (own, ""):
                continue
            order = ORDER if package == "sparing" else LAB_ORDER
            for each in (own, other):
                if each not in order:
                    found.append(f"{package}.{each} has no place in the order of rooms")
            if own in order and other in order and order.index(other) > order.index(own):
                found.append(f"{name} imports {target}, which stands below it on the map")
    return found


def test_imports_point_one_way(trees):
    assert breaches(trees, trees) == []


@pytest.mark.parametrize(
    ("file", "line", "found"),
    [
        ("sparing/maths/dense.py", "from sparing.methods.exact import Exact", "stands below it on the map"),
        ("sparing/native/library.py", "from sparing.draws import Draws", "stands below it on the map"),
        ("sparing/workbench/timing.py", "from sparing_lab.tasks import glue", "does not know the laboratory"),
        ("sparing/index.py", "def _f():\n    from sparing.contract import Method", "inside a function"),
        ("sparing/novel.py", "from sparing.spec import parse", "has no place in the order"),
        ("sparing_lab/tasks/glue.py", "from sparing_lab.training import loop", "stands below it on the map"),
    ],
)
def test_a_planted_import_is_found(trees, file, line, found):
    path = SOURCE / file
    name = module_name(path)
    planted = ast.parse(f"{path.read_text() if path.exists() else ''}\n{line}\n")
    new = breaches([name], {**trees, name: planted})
    assert any(found in each for each in new), new


def test_the_page_names_every_room_and_only_files_that_exist():
    page = (ROOT / "docs" / "architecture.md").read_text()
    for name in ORDER:
        assert re.search(rf"^\s*{name}(\.py|/)", page, re.M), f"docs/architecture.md does not show {name}"
    for name in LAB_ORDER:
        assert re.search(rf"\b{name}(\.py|/)", page), f"docs/architecture.md does not show sparing_lab/{name}"
    named = set(re.findall(r"`((?:src|tests|docs)/[\w./-]+)`", page))
    assert len(named) >= 10
    for path in named:
        assert (ROOT / path).exists(), f"docs/architecture.md names {path}"
