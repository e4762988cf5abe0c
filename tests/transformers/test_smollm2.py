"""The real SmolLM2: a causal model with grouped heads and 30 layers."""

import re

import pytest
import torch

import sparing
from sparing.models import Subject
from sparing.store import Store
from sparing.workbench.comparison import facts
from sparing.workbench.comparison.facts import FactRuns, contexts_of
from sparing.workbench.comparison.judgement import keeps
from sparing.workbench.machine import machine
from sparing.workbench.retrieval.measure import answer_questions, survival
from sparing.workbench.retrieval.tasks import make_context


@pytest.fixture(scope="module")
def smollm2():
    from sparing.models import smollm2

    return smollm2.load()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_sinks_help_and_full_budgets_are_exact_with_the_weights_of_smollm2(smollm2):
    from sparing.models.smollm2 import token_ids

    model = smollm2.model
    ids = token_ids(smollm2, length=160)
    given = {"input_ids": torch.cat([ids[:, :80], ids[:, 80:]]), "attention_mask": torch.ones(2, 80, dtype=torch.long)}
    given["attention_mask"][0, :30] = 0
    valid = given["attention_mask"].bool()
    with torch.no_grad():
        before = model(**given).logits
        with sparing.approximate(model, "exact"):
            torch.testing.assert_close(model(**given).logits[valid], before[valid], rtol=0, atol=1e-5)
        errors = {}
        for spec in ("window(size=32)", "window(size=32, sinks=4)", "top_keys(keys=200)"):
            with sparing.approximate(model, spec):
                off = model(**given).logits[valid] - before[valid]
            errors[spec] = float(off.norm() / before[valid].norm())
        assert torch.equal(model(**given).logits, before)
    assert errors["top_keys(keys=200)"] < 1e-4
    assert 1e-3 < errors["window(size=32, sinks=4)"] < 0.5 * errors["window(size=32)"]

    prompt = {key: value[:, 40:] for key, value in given.items()}
    text = model.generate(**prompt, max_new_tokens=8, do_sample=False)
    with sparing.approximate(model, "window(size=160)"):  # wider than the prompt: exact, through our own path
        assert torch.equal(model.generate(**prompt, max_new_tokens=8, do_sample=False), text)


def test_a_context_beyond_the_positions_of_a_model_is_refused(smollm2, monkeypatch):
    model, tokenizer = smollm2.model, smollm2.tokenizer
    context = make_context("needle", "repeated", 300, 0, lambda text: len(tokenizer(text)["input_ids"]))
    monkeypatch.setattr(model.config, "max_position_embeddings", 100)
    with pytest.raises(ValueError, match=r"context: \d+ tokens and questions of up to \d+ exceed the 100 positions"):
        answer_questions(model, tokenizer, context)


def test_facts_are_counted_from_one_cache_and_kept(smollm2, tmp_path, monkeypatch):
    """One context of 300 tokens: too few facts to call a window that covers it safe, enough to refuse a narrow one."""
    one, store = Subject("smollm2", smollm2.model, smollm2.tokenizer), Store(tmp_path)
    contexts = contexts_of(one, 300, 1)
    narrow, runs = "window(size=64, sinks=4)", FactRuns(one, store, machine(), lambda text: None)
    found = runs.count(contexts, [("window(size=400)", "decode"), (narrow, "decode"), (narrow, "prefill")])
    whole, lost, unread = found.values()
    assert whole.kept.solved == whole.kept.kept >= 4
    holds, said = keeps(whole, 0.9)
    assert holds is None
    assert re.search(r"\d+% at least, 90% wanted; about \d+ contexts \(--facts\) may tell$", said)
    assert lost.kept.share <= 0.5, "the control"
    assert keeps(lost, 0.9)[0] is False
    assert unread.kept.solved == lost.kept.solved
    assert sum(each.solved for each in lost.depths) == lost.kept.solved
    monkeypatch.setattr(facts, "answer_questions", None)
    assert runs.count(contexts, list(found)) == found, "answers are kept"


def test_multipole_keeps_the_facts_that_a_window_loses(smollm2):
    """Two contexts of 400 tokens with eight similar facts each."""
    model, tokenizer = smollm2.model, smollm2.tokenizer

    def count(text):
        return len(tokenizer(text, add_special_tokens=False)["input_ids"])

    contexts = [make_context("keys", "prose", 400, seed, count) for seed in range(2)]
    exact = [answer_questions(model, tokenizer, each) for each in contexts]
    assert sum(map(sum, exact)) >= 8, "the model solves at least half of them"
    for when in ("decode", "always"):
        found = [answer_questions(model, tokenizer, each, "multipole(block=64)", when=when) for each in contexts]
        assert survival(list(zip(exact, found, strict=True))).share >= 0.9
    lost = [answer_questions(model, tokenizer, each, "window(size=64, sinks=4)", when="decode") for each in contexts]
    assert survival(list(zip(exact, lost, strict=True))).share <= 0.4, "the control"
    again = [answer_questions(model, tokenizer, each) for each in contexts]
    assert again == exact, "and the model is as before"
