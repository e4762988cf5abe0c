"""What a mask means: each form that transformers passes is read as padding, causality or neither."""

import pytest
import torch

from sparing.transformers.runtime.masks import add_bias, count_valid_keys, read_mask, shown_keys

LOWEST = torch.finfo(torch.float32).min
PADDING = torch.tensor([[False, False, True, True, True], [True, True, True, True, True]])


def written_out(padding, n_q):
    """[B, 1, n_q, n] of the last n_q positions."""
    n = padding.shape[1]
    return (torch.ones(n_q, n, dtype=torch.bool).tril(n - n_q) & padding[:, None])[:, None]


def added(mask):
    return torch.zeros(mask.shape).masked_fill(~mask, LOWEST)


def read(mask, n_q=5, *, looks_back=True, simplify=True):
    return read_mask(mask, n_q, 5, looks_back=looks_back, simplify=simplify)


@pytest.mark.parametrize("form", [lambda mask: mask, added], ids=["boolean", "additive"])
def test_a_causal_mask_with_padding_is_read_as_its_padding(form):
    mask = read(form(written_out(PADDING, 5)))
    assert mask.causal
    assert not mask.written_out
    assert torch.equal(mask.tensor, PADDING)
    assert torch.equal(mask.for_sdpa(), written_out(PADDING, 5))
    assert torch.equal(mask.for_door(None), PADDING[:, None, None])
    kept = read(form(written_out(PADDING, 5)), simplify=False)
    assert kept.written_out
    assert not kept.causal


@pytest.mark.parametrize("n_q", [1, 2, 3])
@pytest.mark.parametrize("form", [lambda mask: mask, added], ids=["boolean", "additive"])
def test_the_padding_of_tokens_that_continue_a_cache_is_found(form, n_q):
    known, padding = read(form(written_out(PADDING, n_q)), n_q).padding()
    assert known
    assert torch.equal(padding, PADDING)


def test_rows_of_padded_queries_may_show_anything_to_an_index():
    mask = written_out(PADDING, 5)
    mask[0, :, :2] = True
    found = read(mask)
    assert found.written_out, "the method would give these rows other outputs"
    assert found.padding()[0]
    mask[0, :, 3, 1] = True
    assert not read(mask).padding()[0]


def test_masks_that_hide_anything_else_are_not_padding():
    bent, square = written_out(PADDING, 5), written_out(PADDING, 5)
    bent[1, 0, 3, 1] = False
    for mask in (
        bent,
        added(square).clamp_min(-5.0),
        square.expand(2, 4, 5, 5),
        square[..., :4],
        added(square).requires_grad_(),
    ):
        found = read(mask)
        assert found.written_out
        assert found.tensor is mask
        assert found.padding() == (False, None)


def test_no_mask_hides_later_keys_of_prompts_alone():
    assert read(None).causal
    assert not read(None, looks_back=False).causal
    assert not read(None, 1).causal
    assert read(None).padding() == (True, None)
    assert read(None).for_sdpa() is None


def test_the_prompt_of_a_static_cache_sees_no_empty_entries():
    found = read_mask(PADDING, 5, 8, looks_back=True, simplify=True).for_sdpa()
    assert torch.equal(found[..., :5], written_out(PADDING, 5))
    assert not found[..., 5:].any()


def test_a_bias_hides_what_its_mask_hides():
    bias, mask = torch.randn(1, 4, 5, 5), PADDING[:, None, None]
    for form in (mask, added(mask)):
        found = add_bias(bias, form)
        assert torch.equal(found == -torch.inf, ~mask.expand(found.shape))
        assert torch.equal(found[1], bias[0])
    assert add_bias(bias, None) is bias


def test_keys_that_any_query_sees_are_shown_and_counted():
    square = PADDING[:, None, None].expand(2, 1, 5, 5)
    for form in (square, added(square)):
        assert torch.equal(shown_keys(form), PADDING[:, None, None])
    assert count_valid_keys(square, 2, 5) == [3, 5]
    assert count_valid_keys(square[:1], 2, 5) == [3, 3]
    for unknown in (None, added(square), written_out(PADDING, 5)):
        assert count_valid_keys(unknown, 2, 5) == [5, 5]
