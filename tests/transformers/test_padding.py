"""Padding changes nothing and the future changes nothing, through whole models."""

import pytest
import torch

import sparing
from sparing.transformers.runtime import refusals
from tests.support.method_table import ROWS
from tests.support.model_zoo import build, inputs, run, valid

SPECS = [row.spec for row in ROWS if row.supports.key_padding]
CAUSAL_SPECS = [row.spec for row in ROWS if row.supports.key_padding and row.supports.causal]
pytestmark = pytest.mark.filterwarnings("ignore:.*needs further training:UserWarning")


def wrong_tokens(given):
    """The same inputs with other ids, and for left padding other positions, where the padding is."""
    mask = given["attention_mask"].bool()
    changed = dict(given)
    changed["input_ids"] = torch.where(mask, given["input_ids"], 97)
    return changed


def more_padding(given, extra, left):
    def pad(tensor, value):
        return torch.nn.functional.pad(tensor, (extra, 0) if left else (0, extra), value=value)

    return {key: pad(value, 3 if key == "input_ids" else 0) for key, value in given.items() if key != "use_cache"}


def asked(name):
    """Without a cache, into which methods on the value layer cannot put anything."""
    return inputs(name) | ({"use_cache": False} if name in ("gpt2", "llama") else {})


def check(name, spec):
    """Other ids in the padding: the same bits. More padding: the same numbers.

    With more padding torch's own matrix products may be cut into other blocks, which moves the last bit on some
    machines; the common checks allow the same for one call.
    """
    model, given = build(name), asked(name)
    with sparing.approximate(model, spec, seed=5):
        out = valid(name, given, run(model, given))
        assert torch.equal(valid(name, given, run(model, wrong_tokens(given))), out), "ids of padded tokens matter"
        longer = given | more_padding(given, 16, left=name == "llama")
        torch.testing.assert_close(
            valid(name, longer, run(model, longer)), out, rtol=0, atol=1e-6 * float(out.abs().max())
        )


@pytest.mark.parametrize("spec", SPECS)
def test_padding_does_not_matter_to_bert(spec):
    check("bert", spec)


@pytest.mark.parametrize("spec", CAUSAL_SPECS)
def test_left_padding_does_not_matter_to_llama(spec):
    check("llama", spec)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("spec", CAUSAL_SPECS)
def test_later_tokens_do_not_change_earlier_logits(name, spec):
    if name == "gpt2" and sparing.method(spec).supports.projection:
        pytest.skip("GPT-2 has one layer for queries, keys and values; test_refused.py sees the refusal")
    model, given = build(name), asked(name)
    changed = dict(given)
    changed["input_ids"] = given["input_ids"].clone()
    changed["input_ids"][:, 15:] = 90 - changed["input_ids"][:, 15:].clamp(max=90)
    with sparing.approximate(model, spec, seed=5):
        assert torch.equal(run(model, changed)[:, :15], run(model, given)[:, :15])


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_a_lost_mask_is_an_error_and_would_matter(name, monkeypatch):
    """Negative control: without the mask function the numbers change, and sparing raises instead of returning them."""
    model, given = build(name), inputs(name)
    with sparing.approximate(model, "window(size=6)"):
        right = valid(name, given, run(model, given))
        registry, nothing = refusals.AttentionMaskInterface._global_mapping, lambda **others: None
        for broken in ("sparing", "sparing_chosen"):
            for damage in (lambda m: m.delitem(registry, broken), lambda m: m.setitem(registry, broken, nothing)):  # noqa: B023
                with monkeypatch.context() as m:
                    damage(m)
                    with pytest.raises(RuntimeError, match=r"padding and causality would be lost; call .*register"):
                        run(model, given)
        for name_ in ("sparing", "sparing_chosen"):
            monkeypatch.setitem(registry, name_, nothing)
        monkeypatch.setattr(refusals, "mask_function", nothing)
        assert not torch.equal(valid(name, given, run(model, given)), right)
