"""Everything that sparing reads as text: specs, recipes, documents, results, kept results and models' configs.

A parser may refuse with a ValueError or a TypeError whose message is one line and names the argument or the file, or
give something that can be used; the commands may end with status 2 and one such line. Nothing else is allowed: no other
error, no terminal's commands in what is printed, no file read or written beside the one that was named.

A case is {"target": name, "text": ...}; documents are bytes, written as Latin-1, with "name" and "options".
"""

import contextlib
import functools
import gzip
import io
import json
import lzma
import random
import tempfile
import unicodedata
import warnings
from pathlib import Path
from unittest import mock

import sparing
from sparing import documents, spec
from sparing.cli.main import main
from sparing.report.page import page
from sparing.store import Store, verify_checksum
from sparing.transformers.recipe import Recipe
from sparing.workbench.comparison.verdict import Comparison
from tests.fuzz import hostile
from tests.support.comparisons import example

NAME = "parsers"

SPECS = (
    "exact", "nystrom(landmarks=8, solver=exact)", "yoso(hashes=32, normalize='l2', bits=None)", "kernel(kind=elu)",
    "key_clusters(clusters=0.1, cap=2.0)", "window(size=8)", "kernelized", "lsh(rounds=4, chunk=32)", "skyformer(gamma=1e-2)",
)  # fmt: skip
RECIPE = {
    "version": 1, "architecture": "bert", "seed": {"encoder.layer.0.attention.self": 3, "*": None},
    "when": {"*": "prefill"}, "layers": {"encoder.layer.0.attention.self": "window(size=8)", "*": "nystrom(landmarks=8)"},
    "about": {"data": "mine", "gain": [1.0, 2.0, None], "machine": {"cpu": "x"}},
}  # fmt: skip
CELL = {"what": "quality", "method": "window(size=8)", "seed": 0}
ROWS = [{"text": "one, two", "label": 1, "pair": "x"}, {"text": "three", "label": "a", "pair": "y"}]
FILES = {
    "a.txt": "one\ntwo\n", "a.jsonl": "\n".join(map(json.dumps, ROWS)), "a.csv": 'text,label,pair\n"one, two",1,x\nthree,a,y\n',
    "a.tsv": "text\tlabel\tpair\none\t1\tx\n", "a.parquet": "", "a.txt.gz": "", "a.jsonl.xz": "", "a.json": "[]",
}  # fmt: skip
OPTIONS = ({}, {"column": "text"}, {"label": "label"}, {"pair": "pair"}, {"whole": True}, {"column": "\x1b[31m"})


def draw(rng: random.Random) -> dict:
    """Draw a case of any target."""
    return draw_of(rng.choice(list(TARGETS)), rng)


def draw_of(target: str, rng: random.Random) -> dict:
    """Draw a case of one target."""
    if target == "specs":
        return {"target": target, "text": hostile.damaged_text(rng, rng.choice(SPECS), rng.choice((0, 1, 2, 4)))}
    if target == "documents":
        name = rng.choice(list(FILES))
        text = _good_file(name).decode("latin-1")
        if name.endswith(".jsonl") and rng.random() < 0.5:
            text = "\n".join(hostile.json_text(rng, row) for row in ROWS).encode("utf-8", "replace").decode("latin-1")
        text = hostile.damaged_text(rng, text, rng.choice((0, 1, 1, 3))).encode("latin-1", "ignore").decode("latin-1")
        return {"target": target, "name": name, "text": text, "options": rng.choice(OPTIONS)}
    return {"target": target, "text": hostile.json_text(rng, _good_json(target))}


@functools.cache
def _good_json(target: str):
    return {
        "recipes": RECIPE, "configs": RECIPE, "results": verify_checksum(json.loads(example().to_json())), "kept": json.loads(_kept()),
    }[target]  # fmt: skip


@functools.cache
def _good_file(name: str) -> bytes:
    if name.endswith(".parquet"):
        return _parquet()
    if name.endswith(".gz"):
        return gzip.compress(b"one\ntwo\n", mtime=0)
    return lzma.compress(FILES["a.jsonl"].encode()) if name.endswith(".xz") else FILES[name].encode()


def _parquet() -> bytes:
    try:
        import pyarrow
        from pyarrow import parquet
    except ModuleNotFoundError:
        return b"PAR1"
    written = io.BytesIO()
    rows = [{name: str(value) for name, value in row.items()} for row in ROWS]
    parquet.write_table(pyarrow.Table.from_pylist(rows), written)
    return written.getvalue()


def _kept() -> str:
    with tempfile.TemporaryDirectory() as folder:
        Store(folder).put(CELL, RESULT)
        return next(Path(folder).iterdir()).read_text()


RESULT = {"error": 0.25, "layers": [0.1, 0.2], "refused": None}


def unsafe(text: str) -> set[str]:
    """The characters of a text that a terminal would obey."""
    return {
        c for c in text if c not in "\n\t\u200c\u200d" and unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")
    }


def _refused(error: Exception, names: tuple[str, ...]) -> None:
    """Assert that an error is a refusal that a user can act on."""
    said = str(error)
    assert isinstance(error, ValueError | TypeError | MemoryError), f"{type(error).__name__}: {said[:200]}"
    assert said.strip(), "the error says nothing"
    assert "\n" not in said or "\\n" in repr(names), f"more than one line: {said[:200]!r}"
    assert len(said) < 4000, f"an error of {len(said)} characters"
    assert any(name in said for name in names), f"{names[0]} is not named: {said[:200]!r}"


def _specs(case: dict, folder: Path) -> None:
    text = case["text"]
    assert all(isinstance(part, str) for part in spec.split_specs(text))
    try:
        found = sparing.method(text)
    except Exception as error:
        return _refused(error, ("method:", *sparing.list_methods()))
    again = sparing.method(str(found))
    assert again == found, f"{found} parses to {again}"
    return None


def _recipes(case: dict, folder: Path) -> None:
    path = folder / "recipe.json"
    path.write_text(case["text"], encoding="utf-8", errors="surrogatepass")
    try:
        found = Recipe.load(path)
    except Exception as error:
        _refused(error, ("recipe.json",))
    else:
        assert Recipe.of(json.loads(json.dumps(found.to_dict()))).to_dict() == found.to_dict() or "NaN" in case["text"]
        found.name_at(0)
        found.save(folder / "again.json")
        (folder / "again.json").unlink()
    _command(["show", str(path)], "recipe.json", folder)


def _configs(case: dict, folder: Path) -> None:
    try:
        held = json.loads(case["text"])
    except (ValueError, RecursionError):
        return  # transformers reads the file
    model = _model()
    model.config.sparing = held
    try:
        sparing.approximate(model).restore()
    except Exception as error:
        _refused(error, ("recipe", "what:", "encoder.layer"))
    finally:
        del model.config.sparing
    assert model.config._attn_implementation == "sdpa", "the model was changed"


@functools.cache
def _model():
    from transformers import BertConfig, BertModel

    sizes = {
        "hidden_size": 8,
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "intermediate_size": 8,
        "vocab_size": 5,
    }
    return BertModel(BertConfig(**sizes)).eval()


def _documents(case: dict, folder: Path) -> None:
    path = folder / case["name"]
    path.write_bytes(case["text"].encode("latin-1"))
    try:
        found = documents.read([path], **case.get("options", {}))
    except Exception as error:
        return _refused(error, (case["name"],))
    assert len(found), "no documents and no error"
    for text in found.texts:
        assert isinstance(text, str)
        text.encode("utf-8")
    assert len(found.fingerprint) == 16
    return None


def _results(case: dict, folder: Path) -> None:
    path = folder / "found.json"
    path.write_text(case["text"], encoding="utf-8", errors="surrogatepass")
    _command(["show", str(path), "--layers"], "found.json", folder)
    try:
        found = Comparison.from_json(path.read_text(encoding="utf-8"))
    except ValueError:
        return
    with mock.patch("plotly.offline.get_plotlyjs", str):  # megabytes that are the same in every page
        page(found).encode("utf-8")
    Comparison.from_json(found.to_json())


def _kept_results(case: dict, folder: Path) -> None:
    store = Store(folder)
    store.put(CELL, RESULT)
    (path,) = folder.iterdir()
    path.write_text(case["text"], encoding="utf-8", errors="surrogatepass")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it will be measured again
        found = store.get(CELL)
    assert found in (None, RESULT), f"a damaged result was believed: {found!r}"


def _command(arguments: list[str], name: str, folder: Path) -> None:
    """Run a command; 0, or 2 with one line that names the file."""
    before = sorted(folder.iterdir())
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(arguments)
    said = err.getvalue()
    assert not unsafe(out.getvalue() + said), f"printed {unsafe(out.getvalue() + said)}"
    assert status in (0, 2), f"status {status}"
    assert "Error: " not in said, f"an error that nobody expected: {said[:300]!r}"
    if status == 2:
        assert said.count("\n") == 1, f"not one line: {said[:300]!r}"
        assert name in said, f"{name} is not named: {said[:300]!r}"
    assert sorted(folder.iterdir()) == before, "files appeared"


TARGETS = {
    "specs": _specs, "recipes": _recipes, "configs": _configs, "documents": _documents, "results": _results,
    "kept": _kept_results,
}  # fmt: skip


def check(case: dict) -> None:
    """Raise AssertionError where a parser does what it must not."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        TARGETS[case["target"]](case, Path(folder))


def shrink(case: dict):
    """Yield cases with parts of the text left out, the longest parts first."""
    text = case["text"]
    size = len(text) // 2
    while size:
        for start in range(0, len(text), size):
            yield {**case, "text": text[:start] + text[start + size :]}
        size //= 2
    if case.get("options"):
        yield {**case, "options": {}}


def calls(case: dict) -> int:
    """Return how often the library is called."""
    return {"specs": 3, "recipes": 4, "configs": 2, "documents": 1, "results": 3, "kept": 2}[case["target"]]
