"""`approximate(model, "exact")` runs sparing's exact attention where it is faster, and the model's own elsewhere."""

import copy

import pytest
import torch
import transformers
from packaging.version import Version

import sparing
from sparing.methods import exact as exact_method
from sparing.transformers.runtime import exact as exact_runtime
from sparing.transformers.watch import record_calls
from tests.support.model_zoo import build, inputs, run, tokens

ALWAYS = (4, 4)


@pytest.fixture
def faster_always(monkeypatch):
    """Let the kernel count as faster from four queries on, in calls of any size."""
    if not sparing.native.info().loaded:
        pytest.skip("there are no kernels")
    monkeypatch.setattr(exact_method, "_LEAST_QUERIES", dict.fromkeys(exact_method._LEAST_QUERIES, ALWAYS))
    monkeypatch.setattr(exact_runtime, "_LEAST_PRODUCTS", 0)
    if sparing.native.info().instruction_set not in exact_method._LEAST_QUERIES:
        pytest.skip("the kernels of this machine are never faster")


@pytest.fixture
def kernel_calls(monkeypatch):
    """Count the calls of the kernel."""
    found, original = [], exact_method.Exact.by_kernel

    def counted(self, *args):
        found.append(args[0].shape)
        return original(self, *args)

    monkeypatch.setattr(exact_method.Exact, "by_kernel", counted)
    return found


def counts(handle):
    return {(layer.calls, layer.exact_calls) for layer in handle.statistics(reset=True).layers}


@pytest.mark.usefixtures("faster_always")
@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert", "vit", "modernbert", "gpt2", "llama"])
def test_the_kernel_runs_and_gives_the_stock_model(name, kernel_calls):
    model, given = build(name), inputs(name)
    before = run(model, given)
    with sparing.approximate(model, "exact") as handle:
        after = run(model, given)
        ran = handle.statistics().total
    assert len(kernel_calls) == ran.calls > 0
    torch.testing.assert_close(after, before, rtol=0, atol=1e-5)
    assert ran.reduction == 1
    assert torch.equal(run(model, given), before)
    assert len(kernel_calls) == ran.calls, "restored"


@pytest.mark.usefixtures("faster_always")
@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_prompts_run_the_kernel_and_tokens_the_models_own(name, cache, kernel_calls):
    """With left padding; the five tokens after the first continue the cache."""
    # The oldest transformers do not tell how much of a static cache a prompt fills, so that it may be a continuation.
    known = cache is None or Version(transformers.__version__) >= Version("5.22")
    model, given = build(name), inputs(name)
    given = {key: value for key, value in given.items() if key != "position_ids"}
    asked = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": cache}
    before = model.generate(**given, **asked)
    with sparing.approximate(model, "exact") as handle:
        assert torch.equal(model.generate(**given, **asked), before)
        assert counts(handle) == ({(1, 5)} if known else {(0, 6)})
        assert len(kernel_calls) == (len(handle.layers) if known else 0)
        assert all(shape[2] > 1 for shape in kernel_calls)
    with sparing.approximate(model, "exact", when="decode") as handle:
        assert torch.equal(model.generate(**given, **asked), before)
        assert counts(handle) == {(0, 6)}, "prompts are the model's own"


@pytest.mark.usefixtures("faster_always")
def test_a_chunk_of_a_prompt_runs_the_models_own(kernel_calls):
    model, ids = build("llama"), tokens(20)
    with torch.no_grad():
        first = model(ids[:, :12], use_cache=True).past_key_values
        wanted = model(ids[:, 12:], past_key_values=copy.deepcopy(first)).logits
        with sparing.approximate(model, "exact"):
            assert torch.equal(model(ids[:, 12:], past_key_values=copy.deepcopy(first)).logits, wanted)
    assert kernel_calls == []


@pytest.mark.usefixtures("faster_always")
def test_what_the_kernel_does_not_take_is_the_stock_model_to_the_bit(bert, kernel_calls):
    given = inputs("bert")
    square = torch.ones(1, 1, 24, 24, dtype=torch.bool).tril(4)
    cases = {"a mask that differs by query": {**given, "attention_mask": square}, "a gradient": given}
    for why, case in cases.items():
        with torch.set_grad_enabled(why == "a gradient"):
            wanted = bert(**case).last_hidden_state
            with sparing.approximate(bert, "exact") as handle:
                assert torch.equal(bert(**case).last_hidden_state, wanted), why
                assert counts(handle) == {(0, 1)}, why
    bert.train()
    with sparing.approximate(bert, "exact"), torch.no_grad():
        torch.manual_seed(0)
        dropped = bert(**given).last_hidden_state
    torch.manual_seed(0)
    with torch.no_grad():
        assert torch.equal(bert(**given).last_hidden_state, dropped), "weights are dropped as the model does"
    assert kernel_calls == []


def test_small_calls_and_slower_machines_are_the_stock_model_to_the_bit(bert, monkeypatch, kernel_calls):
    given = inputs("bert")
    wanted = run(bert, given)
    with sparing.approximate(bert, "exact"):
        assert torch.equal(run(bert, given), wanted), "too little work for the checks of a call"
        monkeypatch.setattr(exact_runtime, "_LEAST_PRODUCTS", 0)
        monkeypatch.setattr(exact_method, "_LEAST_QUERIES", {})
        assert torch.equal(run(bert, given), wanted)
    assert kernel_calls == []


@pytest.mark.usefixtures("faster_always")
def test_layers_that_are_not_named_are_left_alone_to_the_bit(bert, kernel_calls, tmp_path):
    given = inputs("bert")
    with sparing.approximate(bert, {0: "window(size=4)"}) as handle:
        wanted, recipe = run(bert, given), handle.recipe
        assert "encoder.layer.1.attention.self: the model's own attention" in repr(handle)
    assert kernel_calls == []
    assert list(recipe.layers.values()) == ["window(size=4)", None]
    recipe.save(tmp_path / "recipe.json")
    with sparing.approximate(bert, tmp_path / "recipe.json"):
        assert torch.equal(run(bert, given), wanted)
    assert kernel_calls == []
    with sparing.approximate(bert, {0: "window(size=4)", 1: "exact"}) as handle:
        torch.testing.assert_close(run(bert, given), wanted, rtol=0, atol=1e-5)
        assert len(kernel_calls) == 1
        assert list(handle.recipe.layers.values()) == ["window(size=4)", "exact"]
        assert "encoder.layer.1.attention.self: exact, by sparing where that is faster" in repr(handle)


@pytest.mark.usefixtures("faster_always")
def test_a_model_saved_with_exact_runs_the_kernel_by_name(bert, kernel_calls, tmp_path):
    given = inputs("bert")
    with sparing.approximate(bert, "exact"):
        wanted = run(bert, given)
        bert.save_pretrained(tmp_path)
    loaded = type(bert).from_pretrained(tmp_path, attn_implementation="sparing").eval()
    kernel_calls.clear()
    assert torch.equal(run(loaded, given), wanted)
    assert len(kernel_calls) == 2


@pytest.mark.usefixtures("faster_always")
@pytest.mark.parametrize("method", ["exact", "window(size=4)"])
def test_observed_calls_leave_the_model_its_own_attention(bert, kernel_calls, method):
    given, seen = inputs("bert"), []
    wanted = run(bert, given)
    calls = record_calls(bert, method, lambda: seen.append(run(bert, given)))
    assert len(calls) == 2
    assert torch.equal(seen[0], wanted)
    assert kernel_calls == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.usefixtures("faster_always")
def test_sixteen_bits_are_closer_to_the_truth_than_twice_the_models_own_error(dtype, kernel_calls):
    model, given = build("llama"), inputs("llama")
    truth = run(model, given)
    model.to(dtype)
    own = run(model, given)
    with sparing.approximate(model, "exact"):
        found = run(model, given)
    assert len(kernel_calls) == 2
    assert found.dtype == dtype
    assert float((found - truth).norm()) < 2 * float((own - truth).norm())
