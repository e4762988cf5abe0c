"""Generation with a method: losses against one exact call, and `compare --contexts` from end to end."""

import json
import math

import pytest
import torch

import sparing
from sparing.cli.main import main
from sparing.models import Subject
from sparing.report.page import page
from sparing.workbench.comparison import generation
from sparing.workbench.comparison.verdict import Comparison
from tests.support.model_zoo import build, tokens

SMALL = "multipole(tolerance=0.1, sinks=0, block=16)"


@pytest.fixture
def model():
    found = build("llama")
    found.set_attn_implementation("sdpa")
    return found


def test_a_covering_budget_costs_nothing_and_a_small_one_something(model):
    prompt = generation.read_prompt(model, tokens(90)[0], 20)
    whole = generation.continue_prompt(model, prompt, "multipole(tolerance=0)")
    assert whole.loss == pytest.approx(whole.exact_loss, abs=1e-6)
    small = generation.continue_prompt(model, prompt, SMALL)
    assert abs(small.change) > 1e-5
    assert small.exact_loss == whole.exact_loss
    assert 0 < small.keys_read < 1
    assert min(small.attention_speed, small.token_speed) > 0
    assert model.config._attn_implementation == "sdpa"


def test_the_losses_are_those_of_one_call(model):
    ids = tokens(70)[0]
    found = generation.continue_prompt(model, generation.read_prompt(model, ids, 12), "window(size=1000)")
    with torch.no_grad():
        logits = model(ids[None]).logits[0]
    wanted = torch.nn.functional.cross_entropy(logits[-13:-1].double(), ids[-12:])
    assert found.exact_loss == pytest.approx(float(wanted), abs=1e-5)
    assert found.loss == pytest.approx(float(wanted), abs=1e-5)


class _Letters:
    """A tokenizer whose tokens are letters."""

    pad_token_id = 0

    def __call__(self, text, truncation=False, max_length=None, verbose=True):
        ids = [ord(letter) % 60 + 1 for letter in text]
        return {"input_ids": ids[:max_length] if truncation else ids}


def test_passages_are_joined_from_documents_in_their_order(model):
    subject = Subject("letters", model, _Letters())
    found = generation.passages(subject, ["abc", "defgh", "ijklmnopqr", "st"], 8, 5)
    wanted = [_Letters()(text)["input_ids"] for text in ("abc\n\ndef", "ijklmnop")]
    assert [ids.tolist() for ids in found] == wanted
    with pytest.raises(ValueError, match="contexts=99: the documents have 3 tokens in all"):
        generation.passages(subject, ["abc"], 99, 1)


def test_compare_measures_generation_at_each_context(model, tmp_path, capsys):
    subject = Subject("letters", model, _Letters())
    options = {"length": 30, "documents": 2, "rounds": 1, "jobs": 1, "lengths": False, "contexts": (40, 50)}
    texts = ["the first text, which is long enough to be cut " * 2, "and a second one of other words, as long as that"]
    methods = [SMALL, "window(size=8)", "lsh(rounds=2, chunk=8)", "top_keys(keys=4)", "exact"]
    found = sparing.compare(subject, texts, methods=methods, seeds=2, cache=tmp_path / "kept", **options)
    done = [row for row in found.generation if row.refused is None]
    assert [(row.context, row.passage, row.seed) for row in done if row.method.startswith("multipole")] == [
        (40, 0, 0), (40, 1, 0), (50, 0, 0),
    ]  # fmt: skip
    assert {row.method for row in done} == {str(sparing.method(spec)) for spec in methods[:2]}, "no oracle, not exact"
    (why,) = {row.refused for row in found.generation if row.refused}
    assert "lsh" in why
    again = sparing.compare(subject, texts, methods=methods, seeds=2, cache=tmp_path / "kept", **options)
    assert again.generation == found.generation, "kept, times included"
    path = tmp_path / "found.json"
    path.write_text(found.to_json())
    assert Comparison.from_json(path.read_text()) == found
    assert main(["show", str(path)]) == 0
    out = capsys.readouterr().out
    assert "Generation" in out
    assert out.count(f"{math.exp(done[0].costs.exact_loss):.3f}") >= 2
    assert "lsh(rounds=2, chunk=8): " in out
    assert '<table id="generation">' in page(found)
    held = json.loads(path.read_text())
    del held["sha256"]
    held["generation"][0]["costs"] = None
    with pytest.raises(ValueError, match=r"generation\[0\] must have costs, or say why it is refused"):
        Comparison.from_json(json.dumps(held))


def test_contexts_that_cannot_be_measured_are_refused(model, capsys):
    assert main(["compare", "minilm", "--contexts", "64"]) == 2
    assert "contexts: only language models generate, and minilm is not one (encoder)" in capsys.readouterr().err
    subject = Subject("letters", model, _Letters())
    for context, said in ((4, "contexts=4 must be at least 8 tokens"), (10**6, "contexts=1000000 is more than the")):
        with pytest.raises(ValueError, match=said):
            sparing.compare(subject, ["some text", "and more"], contexts=[context], methods=["window(size=8)"])
