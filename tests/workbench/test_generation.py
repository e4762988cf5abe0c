"""Generation with a method: losses against one exact call, verdicts, and `compare --contexts` from end to end."""

import json
from dataclasses import replace

import pytest
import torch

import sparing
from sparing.cli.main import main
from sparing.models import Subject
from sparing.report.page import page
from sparing.transformers import reasons
from sparing.transformers.runtime import decode
from sparing.workbench.comparison import generation, generation_row, tokens
from sparing.workbench.comparison.facts import KINDS
from sparing.workbench.comparison.races import RacePoint
from sparing.workbench.comparison.rows import with_facts
from sparing.workbench.comparison.verdict import Comparison
from sparing.workbench.estimate import Estimate
from sparing.workbench.memory import tensor_bytes
from sparing.workbench.retrieval.tasks import TASKS
from sparing.workbench.timing import Interval
from tests.support.comparisons import measured
from tests.support.generations import NO_CHANGE, facts_of, row_of, times_of
from tests.support.model_zoo import build
from tests.support.model_zoo import tokens as some_ids

SMALL = "window(size=4)"


@pytest.fixture
def model():
    found = build("llama")
    found.set_attn_implementation("sdpa")
    return found


def test_a_covering_budget_costs_nothing_and_a_small_one_something(model):
    prompt = tokens.read_prompt(model, some_ids(90)[0], 20)
    whole = tokens.continue_prompt(model, prompt, "window(size=1000)")
    assert whole.losses == pytest.approx(whole.exact_losses, abs=1e-5)
    assert all(whole.same)
    small = tokens.continue_prompt(model, prompt, SMALL)
    assert max(abs(a - b) for a, b in zip(small.losses, small.exact_losses, strict=True)) > 1e-3
    assert small.exact_losses == whole.exact_losses
    assert 0 < small.keys_read < 1
    assert small.exact_cache in tokens.CACHES
    assert min(small.token, small.exact_token, small.prompt, *small.token_speed) > 0
    assert small.prompt > small.exact_prompt, "and the index"
    assert model.config._attn_implementation == "sdpa"
    everywhere = tokens.continue_prompt(model, prompt, SMALL, when="always")
    assert everywhere.losses != small.losses, "the prompt is approximated, too"


def test_the_losses_are_those_of_one_call(model):
    ids = some_ids(70)[0]
    found = tokens.continue_prompt(model, tokens.read_prompt(model, ids, 12), "window(size=1000)")
    with torch.no_grad():
        logits = model(ids[None]).logits[0, -13:-1].double()
    wanted = torch.nn.functional.cross_entropy(logits, ids[-12:], reduction="none").tolist()
    assert found.exact_losses == pytest.approx(wanted, abs=1e-5)
    assert found.losses == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("kind", tokens.CACHES)
def test_the_stock_model_runs_with_its_own_cache(model, monkeypatch, kind):
    """Timed tokens of the exact model see neither an index nor a layer of sparing's."""
    from transformers.cache_utils import DynamicLayer, StaticLayer

    seen = []
    run = tokens._run
    monkeypatch.setattr(tokens, "_run", lambda *args: (seen.append((args[3], args[2])), run(*args))[1])
    prompt = tokens.read_prompt(model, some_ids(40)[0], 8)._replace(exact_cache=kind)
    tokens.continue_prompt(model, prompt, SMALL)
    layers = {type(layer) for name, cache in seen if name == "sdpa" and cache is not None for layer in cache.layers}
    assert layers <= {DynamicLayer, StaticLayer}
    assert (DynamicLayer if kind == "dynamic" else StaticLayer) in layers


def test_tokens_that_stay_exact_are_not_measured_as_the_method(model, monkeypatch):
    """A reason to stay exact would look like a method without errors."""
    prompt = tokens.read_prompt(model, some_ids(40)[0], 8)
    monkeypatch.setattr(decode, "obstacle", lambda call: reasons.MASK)
    with pytest.raises(sparing.Unsupported, match=r"window\(size=4\) leaves tokens exact: "):
        tokens.continue_prompt(model, prompt, SMALL)


def test_the_memory_of_an_index_is_that_of_its_tensors():
    k, v = torch.randn(2, 1, 2, 300, 16).unbind(0)
    index = sparing.Index("multipole(block=64)")
    assert tensor_bytes(index) == 0
    index.adopt(k, v, heads=4)
    used = 300 // 64 * 64 * 2 * 16  # a key takes half a byte per entry, a value too
    assert used <= tensor_bytes(index) < k.nbytes + v.nbytes


class _Letters:
    """A tokenizer whose tokens are letters."""

    pad_token_id = 0

    def __call__(self, text, truncation=False, max_length=None, verbose=True, add_special_tokens=True):
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
    options = {"when": ["decode", "always"], "length": 30, "documents": 2, "contexts": (50, 40), "tolerance": 0.5}
    texts = ["the first text, which is long enough to be cut " * 2, "and a second one of other words, as long as that"]
    methods = [SMALL, "lsh(rounds=2, chunk=8)", "top_keys(keys=4)", "exact"]
    found = sparing.compare(subject, texts, methods=methods, cache=tmp_path / "kept", **options)
    assert found.rows == (), "prompts were not asked for"
    done = [row for row in found.generation if row.refused is None]
    assert [(row.method, row.context, row.when, row.passages) for row in done] == [
        (SMALL, 40, "decode", 2), (SMALL, 40, "always", 2), (SMALL, 50, "decode", 1), (SMALL, 50, "always", 1),
    ]  # fmt: skip
    assert {row.verdict for row in done} == {"cannot tell"}, "no task fits into so few tokens"
    assert all("facts: none fits into so short a context" in row.reason for row in done)
    assert [point.length for point in done[0].points] == [40, 50]
    (why,) = {row.refused for row in found.generation if row.refused}
    assert "lsh" in why
    again = sparing.compare(subject, texts, methods=methods, cache=tmp_path / "kept", **options)
    assert again.generation == found.generation, "kept, times included"
    named = sparing.compare(subject, texts, methods=methods, metric="perplexity", cache=tmp_path / "kept", **options)
    assert named.generation[0].verdict in ("safe and faster", "safe, but slower here"), "a named metric decides alone"
    path = tmp_path / "found.json"
    path.write_text(found.to_json())
    assert Comparison.from_json(path.read_text()) == found
    assert main(["show", str(path)]) == 0
    out = capsys.readouterr().out
    assert "Generation: what it does" in out
    shown = " ".join(out.split())
    assert "on texts: 2 passages of 40 tokens, 1 passage of 50 tokens; " in shown, "documents play no part"
    assert "2 passages of 40 tokens, 1 passage of 50 tokens;" in page(found)
    assert "perplexity within 50.00%, and at least 90% of the facts." in shown
    path.write_text(named.to_json())
    assert main(["show", str(path)]) == 0
    assert "perplexity within 50.00%. " in " ".join(capsys.readouterr().out.split()), "facts were not required"
    assert ("must be kept, too" in page(found), "must be kept, too" in page(named)) == (True, False)
    path.write_text(found.to_json())
    assert f"{done[0].exact_perplexity:.3f}" in page(found)
    assert f"exact, {done[0].times.exact_cache}" in out
    assert "lsh(rounds=2, chunk=8): " in out
    assert page(found).count('<table class="generation">') == 2
    held = json.loads(path.read_text())
    del held["sha256"]
    held["generation"][0]["times"] = None
    with pytest.raises(ValueError, match=r"generation\[0\] must have figures, or say why it is refused"):
        Comparison.from_json(json.dumps(held))


def test_default_contexts_are_those_that_model_and_documents_allow(model, monkeypatch):
    subject = Subject("letters", model, _Letters())
    assert generation.contexts_for(subject, ["some text"], None) == [], "the model has fewer positions"
    monkeypatch.setattr(generation, "CONTEXTS", (8, 20, 30))
    assert generation.contexts_for(subject, ["twenty letters or some more"], None) == [8, 20]
    assert generation.contexts_for(subject, ["x"], [30, 8, 30]) == [8, 30], "those that are named are not left out"


@pytest.mark.parametrize(
    ("change", "facts", "speed", "metric", "verdict", "said"),
    [
        (NO_CHANGE, (80, 80), 2.0, None, "safe and faster", ""),
        (NO_CHANGE, (80, 80), 0.9, None, "safe, but slower here", ""),
        (NO_CHANGE, (80, 40), 2.0, None, "not safe", "40 of 80 facts kept"),
        (NO_CHANGE, (8, 8), 2.0, None, "cannot tell", "8 of 8 facts kept: "),
        (NO_CHANGE, None, 2.0, None, "cannot tell", "none fits"),
        (Estimate(0.05, 0.03, 0.07, 12), (80, 80), 2.0, None, "not safe", "perplexity +5.00%, at least 3.00%"),
        (Estimate(0.008, -0.01, 0.02, 12), (80, 80), 2.0, None, "cannot tell", "in 12 blocks of tokens"),
        (Estimate(0.008, None, None, 1), (80, 80), 2.0, None, "cannot tell", "too few for an interval"),
        (Estimate(float("inf"), None, None, 9), (80, 80), 2.0, None, "not safe", "not finite"),
        (Estimate(0.05, 0.03, 0.07, 12), (80, 40), 2.0, None, "not safe", "3.00%; 40 of 80 facts kept"),
        (NO_CHANGE, (80, 40), 2.0, "perplexity", "safe and faster", ""),
        (Estimate(0.05, 0.03, 0.07, 12), (80, 80), 2.0, "needle", "safe and faster", ""),
    ],
)
def test_the_verdict_needs_perplexity_and_facts(change, facts, speed, metric, verdict, said):
    tolerance = 0.1 if metric == "needle" else 0.01
    counted = None if facts is None else facts_of(*facts)
    found = generation_row.judge(change, NO_CHANGE, counted, times_of(speed), metric=metric, tolerance=tolerance)
    assert found[0] == verdict
    assert said in found[1]
    assert bool(said) == bool(found[1])


def test_every_task_is_asked():
    assert {task for task, _ in KINDS} == set(TASKS)


def test_facts_are_counted_by_depth():
    found = facts_of(8, 5)
    assert [(each.solved, each.kept) for each in found.depths] == [(2, 2), (2, 1), (2, 1), (2, 1), (0, 0)]
    assert (found.asked, found.contexts, found.kept.solved, found.kept.kept) == (8, 2, 8, 5)
    assert found.lost.mean == pytest.approx(3 / 8)
    assert found.lost.low < 3 / 8 < found.lost.high


@pytest.mark.parametrize(
    ("facts", "tolerance", "verdict"),
    [((80, 80), None, "safe, but slower here"), ((80, 8), None, "not safe"), ((4, 4), None, "cannot tell"),
     ((80, 80), 0.1, "safe, but slower here"), ((80, 8), 0.1, "not safe"), ((80, 8), 0.99, "safe, but slower here")],
)  # fmt: skip
def test_prompts_of_a_language_model_need_facts_too(facts, tolerance, verdict):
    row = measured("window(size=64)", "safe, but slower here" if tolerance is None else "not safe", 0.001, 0.5)
    found = with_facts(row, facts_of(*facts), tolerance)
    assert found.verdict == verdict
    assert ("facts kept" in found.reason) == (not verdict.startswith("safe"))
    assert found.change == (row.change if tolerance is None else facts_of(*facts).lost)


def test_the_summary_says_what_to_do():
    def said(*rows):
        return generation_row.generation_summary(rows)

    rows = [row_of("safe and faster", 2000, 1.2), row_of("safe and faster", 8000, 1.9)]
    assert said(*rows).startswith(
        "Generation after 8,000 tokens: turn on multipole. A token takes 1000 ms instead of 1900 (1.90x as fast), 79 of "
        "the 80 facts that exact attention finds are kept (at least 9"
    )
    slow = row_of("safe, but slower here", 8000, 0.9, crossover=9876, points=(RacePoint(256, Interval(0.5, 0.5, 0.5)),))
    assert "nothing that is safe is faster here. Tokens are faster from about 9,900 tokens" in said(slow)
    assert "cannot tell whether multipole is safe (few)" in said(row_of("cannot tell", 8000, 2.0, reason="few"))
    assert "keep exact attention, no method is safe; the mildest, multipole: lost" in said(
        row_of("not safe", 8000, 2.0, reason="lost")
    )
    slower = row_of("cannot tell", 8000, 0.7, reason="few")
    assert said(slower) == "Generation after 8,000 tokens: keep exact attention, nothing is faster here."
    unsafe = row_of("not safe", 8000, 2.0, reason="lost")
    assert "keep exact attention, nothing that may be safe is faster here" in said(slower, unsafe)
    assert "cannot tell whether" in said(slower, row_of("cannot tell", 8000, 2.0, reason="few"))
    quick = replace(times_of(1.5), token=0.00042, exact_token=0.0106)
    assert "A token takes 0.42 ms instead of 11 (" in said(row_of("safe and faster", 8000, 1.5, times=quick))
    assert said() == ""


def test_contexts_that_cannot_be_measured_are_refused(model, capsys):
    assert main(["compare", "minilm", "--contexts", "64"]) == 2
    assert "contexts: only language models generate, and minilm is not one (encoder)" in capsys.readouterr().err
    subject = Subject("letters", model, _Letters())
    for context, said in ((4, "contexts=4 must be at least 8 tokens"), (10**6, "contexts=1000000 is more than the")):
        with pytest.raises(ValueError, match=said):
            sparing.compare(subject, ["some text", "and more"], contexts=[context], methods=["window(size=8)"])


LONG = ["some text that is longer than sixty letters, so that one context of that many fits", "and more"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"when": ["decode"]}, r"no context of 2000, 8000 fits letters \(\d+ positions\) and the documents; pass"),
        ({"when": ["always"], "contexts": []}, "contexts is empty; pass --contexts N, or add prefill to when"),
        ({"when": ["decode"], "contexts": [8], "methods": ["exact", "top_keys(keys=4)"]},
         r"methods: exact, top_keys\(keys=4\) cannot be measured in generation, which leaves out oracles and exact"),
        ({"when": ["prefill"], "contexts": [8]}, "contexts=8 is for generation: name decode or always in when"),
        ({"when": ["decode"], "contexts": [60], "metric": "needle"},
         "metric='needle': no task fits into contexts=60 tokens; use a longer context"),
    ],
)  # fmt: skip
def test_a_comparison_that_would_measure_nothing_is_refused(model, monkeypatch, options, said):
    monkeypatch.setattr(generation, "continue_prompt", lambda *args, **options: pytest.fail("it was measured"))
    with pytest.raises(ValueError, match=said):
        sparing.compare(Subject("letters", model, _Letters()), LONG, **{"methods": [SMALL], **options})


def test_facts_are_for_language_models(capsys):
    assert main(["compare", "minilm", "--facts", "3"]) == 2
    assert "facts: only language models find them, and minilm is not one (encoder)" in capsys.readouterr().err


def test_prompts_are_measured_where_no_method_can_generate(model):
    subject = Subject("letters", model, _Letters())
    options = {"contexts": [8], "length": 20, "jobs": 1, "rounds": 1, "lengths": False}
    found = sparing.compare(subject, LONG, methods=["exact"], **options)
    assert found.generation == ()
    assert found.summary.startswith("On 2 documents"), "without a blank before it"


def test_a_method_that_one_passage_refuses_is_refused(model, monkeypatch):
    run, calls = generation.continue_prompt, []

    def continue_prompt(*args, **options):
        calls.append(args)
        if len(calls) == 1:
            raise sparing.Unsupported("not this passage")
        return run(*args, **options)

    monkeypatch.setattr(generation, "continue_prompt", continue_prompt)
    subject = Subject("letters", model, _Letters())
    found = sparing.compare(subject, ["a" * 20, "b" * 20], methods=[SMALL], when=["decode"], contexts=[16])
    assert len(calls) == 2
    assert [row.refused for row in found.generation] == ["not this passage"]
