"""The pages say what the code does."""

import ast
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import sparing
from sparing.models import load
from sparing.report.markdown import page
from tests.support.common_checks import CHECKS
from tests.support.method_table import Row
from tests.support.small_models import saved

ROOT = Path(__file__).parent.parent


def test_the_methods_page_is_generated_from_the_code():
    wanted = (ROOT / "docs" / "methods.md").read_text()
    assert wanted == page(), "run: python -m sparing.report.markdown > docs/methods.md"


def test_specs_in_the_readme_exist():
    text = (ROOT / "README.md").read_text()
    specs = re.findall(r'method="([^"]+)"', text)
    assert len(specs) >= 3
    for spec in specs:
        sparing.method(spec)


def test_the_first_example_prints_what_it_says(capsys):
    torch.manual_seed(0)
    code = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)[0]
    exec(code, {})
    found = [float(each) for each in re.findall(r"tensor\((.*?)\)", capsys.readouterr().out)]
    claimed = [float(each) for each in re.findall(r"0\.\d+", code.partition("# about ")[2].partition("\n")[0])]
    assert len(claimed) == 3
    assert found == pytest.approx(claimed, rel=0.3)


def test_the_readme_shows_both_commands():
    text = (ROOT / "README.md").read_text()
    makefile = (ROOT / "Makefile").read_text()
    for target in ("compare", "test", "bench", "test-all"):
        assert f"make {target}" in text
        assert re.search(rf"^{target}:", makefile, re.M)


def test_the_method_in_contributing_passes_the_checks(monkeypatch):
    module = sys.modules["sparing.contract"]
    monkeypatch.setattr(module, "_REGISTRY", dict(module._REGISTRY))
    code = re.search(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.S).group(1)
    names = {"dataclass": dataclass, "Method": sparing.Method, "Supports": sparing.Supports, "Cost": sparing.Cost}
    exec(code, names)
    row = Row("mean")
    ran = [name for name, check in CHECKS.items() if check.applies(row) and name != "spec and cost"]
    assert len(ran) > 8
    for name in ran:
        CHECKS[name](row, "reference")


def test_pictures_of_the_docs_exist_and_are_small():
    found = [
        (source, name)
        for source in (ROOT / "docs").glob("*.md")
        for name in re.findall(r"!\[.+?\]\((.+?)\)", source.read_text())
    ]
    assert len(found) >= 3
    for source, name in found:
        picture = (source.parent / name).read_text()
        assert picture.startswith("<svg")
        assert len(picture) < 60_000


def test_the_loop_on_the_multipole_page_runs():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "multipole.md").read_text(), re.S)
    (loop,) = (block for block in blocks if "sparing.Index" in block)
    names: dict = {}
    exec(loop, names)
    assert names["index"].length == names["n"] + 1
    assert names["out"].shape == (2, 6, 1, 64)


def test_the_recipe_for_the_evaluation_harness_runs(tmp_path, monkeypatch):
    """Where lm_eval is installed, which sparing does not ask for."""
    pytest.importorskip("lm_eval")
    text = (ROOT / "docs" / "compare.md").read_text()
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", text, re.S) if "lm_eval" in block)
    (task,) = re.findall(r"```yaml\n(.*?)```", text, re.S)
    (tmp_path / "facts.yaml").write_text(task)
    rows = [{"text": f"{number} and so on, at some length: the number is", "answer": "12"} for number in range(3)]
    (tmp_path / "facts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    names: dict = {}
    exec(code, names)
    one = load(str(saved(tmp_path / "model", "llama")))
    exact, found, share = names["compare_tasks"](one.model, one.tokenizer, "window(size=4)", ["facts"], str(tmp_path))
    assert exact["facts"]["exact_match,none"] == found["facts"]["exact_match,none"] == 0.0, "of a random model"
    assert 0 < share < 1


def test_the_tests_that_the_security_page_names_exist():
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "security.md").read_text()))
    source = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert len(named) > 12
    assert {name for name in named if f"def {name}(" not in source} == set()


def test_nothing_evaluates_what_it_reads():
    """As the security page says: no eval, no pickle but our own, no code of a model."""
    found = {
        (path.name, node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id)
        for path in (ROOT / "src").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name) and _runs(node)
    }
    assert found == {("runs.py", "loads")}, "a model of the same run, in a folder of its own"


def _runs(node: ast.Call) -> bool:
    """Whether a call could run what it is given."""
    name, options = ast.unparse(node.func), {each.arg: ast.unparse(each.value) for each in node.keywords}
    hub = name.endswith(".from_pretrained") and ast.unparse(node.args[0]) == "name"
    return (
        name in ("eval", "exec", "compile", "__import__", "pickle.load", "pickle.loads")
        or (name == "torch.load" and options.get("weights_only") != "True")
        or "allow_pickle" in options
        or options.get("trust_remote_code", "False") != "False"
        or (hub and "trust_remote_code" not in options)
    )
