"""`approximate(model, "exact")` is the stock model, and `restore()` gives back its bits."""

import copy

import pytest
import torch

import sparing
from tests.support.model_zoo import CAUSAL, THROUGH_THE_HOOK, build, inputs, run, tokens, valid


@pytest.mark.parametrize("name", THROUGH_THE_HOOK)
def test_exact_is_the_stock_model(name):
    model, given = build(name), inputs(name)
    if not hooked(model):
        with pytest.raises(sparing.Unsupported, match="computes its own attention"):
            sparing.approximate(model, "top_keys(keys=4)")
        return
    before = run(model, given)
    handle = sparing.approximate(model, "exact")
    torch.testing.assert_close(run(model, given), before, rtol=0, atol=1e-5)
    handle.restore()
    assert torch.equal(run(model, given), before)


def hooked(model):
    from sparing.transformers.find import find, uses_hook

    return any(uses_hook(layer.module) for layer in find(model))


@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert", "vit", "gpt2", "llama"])
def test_the_door_at_full_budget_is_the_stock_model(name):
    """Not SDPA behind our name but our own path: masks, causality, scales and head groups reach the method intact."""
    model, given = build(name), inputs(name)
    before = run(model, given)
    with sparing.approximate(model, "top_keys(keys=1000)"):
        out = run(model, given)
    keep = given.get("attention_mask")
    rows = slice(None) if keep is None else keep.bool()
    torch.testing.assert_close(out[rows], before[rows], rtol=0, atol=1e-5)
    assert torch.equal(run(model, given), before)


@pytest.mark.parametrize("name", ["bart", "whisper"])
def test_cross_attention_at_full_budget_is_the_stock_model(name):
    model, given = build(name), inputs(name)
    before = run(model, given)
    with sparing.approximate(model, "top_keys(keys=1000)"):
        torch.testing.assert_close(run(model, given), before, rtol=0, atol=1e-5)


def test_t5_position_bias_reaches_a_method_that_takes_it():
    model, given = build("t5"), inputs("t5")
    if not hooked(model):
        pytest.skip(
            "this transformers computes T5's attention by itself; test_exact_is_the_stock_model sees the refusal"
        )
    before = run(model, given)
    with sparing.approximate(model, "monte_carlo(alpha=0)", layers="encoder.*"):
        torch.testing.assert_close(run(model, given), before, rtol=0, atol=1e-5)
    with pytest.raises(sparing.Unsupported, match=r"encoder\.block\.0.*position bias"):
        sparing.approximate(model, "nystrom", layers="encoder.*")


def test_full_budgets_are_the_stock_model_with_the_weights_of_minilm(minilm):
    ids = minilm.ids[:, :128]
    mask = torch.ones_like(ids)
    mask[0, 100:] = 0
    given = {"input_ids": ids, "attention_mask": mask}
    before = run(minilm.model, given)
    with sparing.approximate(minilm.model, "exact"):
        torch.testing.assert_close(run(minilm.model, given), before, rtol=0, atol=1e-5)
    with sparing.approximate(minilm.model, "top_keys(keys=1000)"):
        torch.testing.assert_close(run(minilm.model, given)[mask.bool()], before[mask.bool()], rtol=0, atol=1e-5)
    assert torch.equal(run(minilm.model, given), before)


@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize("spec", ["exact", "top_keys(keys=1000)"])
@pytest.mark.parametrize("cache", [None, "static"])
def test_generation_is_the_stock_model(name, spec, cache):
    """Left padding, a growing or a static cache: the prompt through the method, and the rest too."""
    model, given = build(name), inputs(name)
    given = {key: value for key, value in given.items() if key != "position_ids"}
    asked = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": cache}
    before = model.generate(**given, **asked)
    with sparing.approximate(model, spec) as handle:
        after = model.generate(**given, **asked)
        layers = handle.statistics().layers
        assert ("prompts and tokens that continue a cache (decoding) run as above" in repr(handle)) == (spec != "exact")
    assert torch.equal(before, after)
    # Six tokens: a prompt and five steps, which a budget of all keys makes exact.
    counts = {(layer.calls, layer.exact_calls, layer.covered) for layer in layers}
    assert counts == {(0, 6, 0) if spec == "exact" else (1, 0, 6)}


def test_a_prompt_that_continues_a_cache_runs_exact():
    model, ids = build("llama"), tokens(20)
    with torch.no_grad():
        first = model(ids[:, :12], use_cache=True)
        wanted = model(ids[:, 12:], past_key_values=copy.deepcopy(first.past_key_values)).logits
        told = pytest.warns(UserWarning, match='value_aware cannot continue a cache; use .* or pass when="prefill"')
        with sparing.approximate(model, "value_aware(keys=2)"), told:
            found = model(ids[:, 12:], past_key_values=copy.deepcopy(first.past_key_values)).logits
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


def test_grouped_queries_are_repeated_heads():
    """Llama with two key heads is Llama with four, each pair of which is equal."""
    grouped, whole = build("llama"), build("llama", num_key_value_heads=4)
    state = grouped.state_dict()
    for key in [k for k in state if "k_proj" in k or "v_proj" in k]:
        state[key] = state[key].unflatten(0, (2, 16)).repeat_interleave(2, dim=0).flatten(0, 1)
    whole.load_state_dict(state)
    given = inputs("llama")
    for spec in ("exact", "window(size=6, sinks=1)", "top_keys(keys=3)"):
        with sparing.approximate(grouped, spec), sparing.approximate(whole, spec):
            torch.testing.assert_close(run(grouped, given), run(whole, given), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["bert", "distilbert", "vit", "llama"])
@pytest.mark.parametrize(("dtype", "allowed"), [(torch.bfloat16, 0.06), (torch.float16, 0.01)])
def test_sixteen_bits_err_as_the_exact_model_does(name, dtype, allowed):
    """Inside a call everything is float32: in 16 bits a model errs as its exact self does.

    A sampled value may take one sample more or less where rounding tips its count: its error keeps its size.
    """
    model, given = build(name), inputs(name) | ({"use_cache": False} if name == "llama" else {})
    outs = {}
    for bits in (torch.float32, dtype):
        model.to(bits)
        cast = {key: x.to(bits) if torch.is_tensor(x) and x.is_floating_point() else x for key, x in given.items()}
        for spec in ("exact", "monte_carlo(alpha=0)", "window(size=8, sinks=1)", "monte_carlo(alpha=0.2)"):
            with sparing.approximate(model, spec):
                out = run(model, cast)
            assert out.dtype == bits
            outs[spec, bits] = valid(name, given, out).float()
    for spec in ("exact", "monte_carlo(alpha=0)", "window(size=8, sinks=1)"):
        wanted = outs[spec, torch.float32]
        assert float((outs[spec, dtype] - wanted).norm() / wanted.norm()) < allowed
    errors = [float((outs["monte_carlo(alpha=0.2)", b] - outs["exact", b]).norm()) for b in (torch.float32, dtype)]
    assert 0.8 < errors[1] / errors[0] < 1.25
