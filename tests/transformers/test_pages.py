"""The code of README.md, docs/transformers.md and docs/multipole.md runs, with small models instead of downloaded ones."""

import re
import warnings
from pathlib import Path

import pytest
import torch
import transformers

import sparing
from tests.support.model_zoo import build, inputs

ROOT = Path(__file__).parents[2]


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S)


@pytest.fixture
def names(monkeypatch, tmp_path) -> dict:
    """What the pages assume: a model of eight layers for the name on the hub, a batch, and a folder to write into."""
    load, model = transformers.AutoModel.from_pretrained, build("bert", num_hidden_layers=8)
    monkeypatch.setattr(
        transformers.AutoModel,
        "from_pretrained",
        lambda name, **more: model if name == "bert-base-uncased" else load(name, **more),
    )
    monkeypatch.chdir(tmp_path)
    return {"batch": inputs("bert")}


def test_the_transformers_page_approximates_and_restores(names, capsys):
    first, *_ = blocks("docs/transformers.md")
    exec(first, names)
    printed = capsys.readouterr().out
    assert "8 of 8 attention layers approximated" in printed
    assert "nystrom(landmarks=64)" in printed
    assert set(names["handle"].layers.values()) == {"exact"}


def test_the_transformers_page_decodes_from_an_index():
    _, decode, *_ = blocks("docs/transformers.md")
    model, given = build("llama"), inputs("llama")
    exec(
        decode.replace("max_new_tokens=200", "max_new_tokens=4"), {"sparing": sparing, "model": model, "inputs": given}
    )
    with torch.no_grad():
        cache = model(**given, use_cache=True).past_key_values
    assert all(layer.index is not None for layer in cache.layers)


def test_the_transformers_page_keeps_the_recipe_with_the_model(names):
    first, *_, keep = blocks("docs/transformers.md")
    exec(first.split("with ")[0] + keep, names)
    assert set(names["handle"].layers.values()) == {"nystrom(landmarks=64)"}
    assert sparing.Recipe.load("recipe.json") == names["handle"].recipe


def test_the_transformers_page_quantises_weights():
    """The linear layers are compiled without generating code, for the time that it takes."""
    _, _, quantise, _ = blocks("docs/transformers.md")
    model = build("llama")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torchao
        pytest.importorskip("torchao", reason="torchao is not installed")
        exec(quantise.replace("compile()", 'compile(backend="aot_eager")'), {"sparing": sparing, "model": model})
        with torch.no_grad():
            cache = model(**inputs("llama"), use_cache=True).past_key_values
    assert all(layer.index is not None for layer in cache.layers)


def test_the_readme_runs(names):
    call, refused, model, layer = blocks("README.md")
    exec(call, names)
    assert names["out"].shape == names["q"].shape
    shown, message = re.fullmatch(r">>> (.+)\nUnsupported: (.+)\n", refused).groups()
    with pytest.raises(sparing.Unsupported) as caught:
        exec(shown, names)
    assert str(caught.value) == message
    exec(model, names)
    assert set(names["handle"].layers.values()) == {"exact"}
    names |= {"x": torch.randn(2, 16, 512), "padding": torch.zeros(2, 16, dtype=torch.bool)}
    exec(layer, names)
    assert names["out"].shape == (2, 16, 512)


def test_the_page_of_multipole_runs():
    """With a tiny untrained model, which answers nothing, and contexts of 60 characters for its tokens."""
    call, facts, _ = blocks("docs/multipole.md")
    q, k, v = torch.randn(3, 1, 2, 300, 16).unbind(0)
    names = {"sparing": sparing, "model": build("llama"), "q": q, "k": k, "v": v}
    exec(call, names)
    assert names["out"].shape == v.shape
    names["handle"].restore()

    def tokenizer(text, **_):
        return {"input_ids": [1 + ord(letter) % 20 for letter in text[:60]]}

    names |= {"tokenizer": tokenizer}
    exec(facts.replace("range(20)", "range(2)").replace("2000", "400"), names)
    assert len(names["found"]) == 2
