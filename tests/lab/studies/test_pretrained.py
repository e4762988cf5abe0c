"""Texts of one length, and the perplexity of each."""

import pytest
import torch

from sparing_lab.studies._pretrained import cut, perplexity
from tests.support.model_zoo import build, tokens


def test_perplexity_is_that_of_the_next_tokens():
    model, ids = build("llama"), tokens(30, 3)
    with torch.no_grad():
        logits = model(ids).logits[:, :-1].log_softmax(-1)
    nll = -logits.gather(-1, ids[:, 1:, None]).squeeze(-1).mean(-1)
    torch.testing.assert_close(perplexity(model, ids), nll.exp(), rtol=1e-5, atol=0)


def test_texts_that_are_too_short_are_passed_over():
    texts = ["ab", "abcd", "abc", "x", "bcd"]
    assert cut(texts, lambda text: [ord(letter) for letter in text], 3, 2).tolist() == [[97, 98, 99]] * 2
    with pytest.raises(ValueError, match="only 3 texts have 3 tokens; ask for fewer documents than 4"):
        cut(texts, lambda text: [ord(letter) for letter in text], 3, 4)
