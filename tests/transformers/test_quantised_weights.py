"""Models whose linear layers hold int8 weights, by torchao."""

from __future__ import annotations

import warnings

import pytest
import torch

import sparing
from tests.support.decoding import COVERING, NEW, SMALL, generate
from tests.support.model_zoo import build


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_of_int8_weights_is_approximated_as_any_other(dtype):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchao's own, about parts of it that are not for this machine
        torchao = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
        model = build("llama").to(dtype)
        torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
        wanted = generate(model)
    assert type(model.model.layers[0].self_attn.k_proj.weight) is not torch.nn.Parameter
    with sparing.approximate(model, COVERING[0], when="decode"):
        assert torch.equal(generate(model), wanted)
    for when, calls in (("decode", 0), ("always", 1)):
        with sparing.approximate(model, SMALL, when=when) as handle:
            assert not torch.equal(generate(model), wanted), "the budget is small enough to be seen"
            for layer in handle.statistics().layers:
                assert (layer.calls, layer.steps, layer.exact_reasons) == (calls, NEW - 1, {})
    assert torch.equal(generate(model), wanted)
