"""The measurement of decoding, on a small model."""

import pytest
import torch

from sparing.workbench import decode as measured
from tests.support.model_zoo import build, tokens

SMALL = "multipole(clusters=4, keys=4, window=0, sinks=0, chunk=16)"


@pytest.fixture
def model():
    found = build("llama")
    found.set_attn_implementation("sdpa")
    return found


def test_a_covering_budget_costs_nothing_and_a_small_one_something(model):
    ids = tokens(90)[0]
    prompt = measured.read(model, ids, 20)
    whole = measured.decode(model, prompt, "multipole(keys=1000)")
    assert whole.loss == pytest.approx(whole.exact_loss, abs=1e-6)
    small = measured.decode(model, prompt, SMALL)
    assert abs(small.loss - small.exact_loss) > 1e-5
    assert small.exact_loss == whole.exact_loss
    assert 0 < small.read < 1
    assert min(small.attention, small.exact_attention, small.token, small.exact_token) > 0
    assert model.config._attn_implementation == "sdpa"


def test_the_losses_are_those_of_one_call(model):
    ids = tokens(70)[0]
    found = measured.decode(model, measured.read(model, ids, 12), "window(size=1000)")
    with torch.no_grad():
        logits = model(ids[None]).logits[0]
    wanted = torch.nn.functional.cross_entropy(logits[-13:-1].double(), ids[-12:])
    assert found.exact_loss == pytest.approx(float(wanted), abs=1e-5)
    assert found.loss == pytest.approx(float(wanted), abs=1e-5)
