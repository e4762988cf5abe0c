"""Errors, times and recorded calls: numbers that can be wrong in ways a table would hide."""

import math

import pytest
import torch

import sparing
from sparing.models import minilm
from sparing.transformers.watch import is_approximated, record_calls
from sparing.workbench.metrics import rank_correlation
from sparing.workbench.timing import speed_ratio
from tests.support.inputs import effective_count
from tests.support.layer_errors import layer_error


def test_recorded_calls_reproduce_the_model():
    encoder = minilm.load()
    ids = minilm.token_ids(encoder, length=48, documents=2)
    outputs = []
    modules = [m.attention.self for m in encoder.model.encoder.layer]
    hooks = [m.register_forward_hook(lambda module, args, out: outputs.append(out[0])) for m in modules]
    layers = record_calls(encoder.model, "monte_carlo", lambda: encoder.model(input_ids=ids))
    for hook in hooks:
        hook.remove()
    assert len(layers) == 6
    for layer, wanted in zip(layers, outputs, strict=True):
        found = sparing.attention(layer.query, layer.key, layer.value).transpose(1, 2).flatten(2)
        assert torch.allclose(found, wanted, atol=1e-5)
    assert not is_approximated(encoder.model)


def test_a_model_is_restored_after_a_recording_that_fails():
    encoder = minilm.load()
    with pytest.raises(IndexError):
        record_calls(encoder.model, "monte_carlo", lambda: encoder.model(input_ids=torch.full((1, 4), 10**6)))
    assert not is_approximated(encoder.model)
    assert not any(m._forward_pre_hooks for m in encoder.model.modules())


def test_a_tampered_model_is_refused(monkeypatch):
    monkeypatch.setattr(minilm, "SHA256", "0" * 64)
    with pytest.raises(ValueError, match=r"expected 0000.*reinstall"):
        minilm.weights_folder()


def test_real_layers_are_peaked(minilm_layers):
    counts = [effective_count(layer.query, layer.key) for layer in minilm_layers]
    assert min(counts) < 128 / 3, f"effective counts {counts}: near-uniform attention would flatter every method"


def test_error_parts_obey_the_triangle_inequality_and_mean_what_they_say(minilm_layers):
    layer = minilm_layers[2]
    for spec in (
        "nystrom(landmarks=16)",
        "kernelized",
        "skyformer(landmarks=64)",
        "yoso(hashes=16)",
        "monte_carlo(alpha=0.5)",
    ):
        split = layer_error(spec, layer, seeds=(0, 1))
        assert split.total <= split.substitution + split.approximation + 1e-9
        method = sparing.method(spec)
        assert (split.substitution == 0) == (method.exact_target() == sparing.method("exact"))
        assert split.total > 0
    assert layer_error("exact", layer).total < 1e-6, "our kernel against torch's"
    assert layer_error("kernelized", layer).approximation == 0


def test_rank_correlation():
    x = torch.tensor([3.0, 1.0, 2.0, 10.0])
    assert rank_correlation(x, x.exp()) == pytest.approx(1.0)
    assert rank_correlation(x, -x) == pytest.approx(-1.0)
    assert rank_correlation(x, torch.tensor([2.0, 3.0, 1.0, 4.0])) == pytest.approx(1 - 6 * 6 / 60)
    # Ties share a rank: by hand, ranks 1.5 1.5 3 4 against 1 2 3 4.
    assert rank_correlation(torch.tensor([0.0, 0.0, 5.0, 7.0]), torch.arange(4.0)) == pytest.approx(
        4.5 / (4.5 * 5) ** 0.5
    )
    assert math.isnan(rank_correlation(torch.zeros(4), x))


def test_speed_ratio_is_taken_round_by_round(monkeypatch):
    """A clock that the two sides move by hand: the second round is ten times slower for both, the ratio is not."""
    clock, order = [0.0], []

    def side(name, seconds):
        def run():
            order.append(name)
            clock[0] += seconds * (10 if len(order) in (3, 4) else 1)

        return run

    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    found = speed_ratio(side("base", 6.0), side("own", 2.0), rounds=3)
    assert found == pytest.approx((3.0, 3.0, 3.0))
    assert order == ["own", "base", "base", "own"] * 2, "one warm-up, then the order alternates"
    with pytest.raises(ValueError, match="rounds=0"):
        speed_ratio(lambda: None, lambda: None, rounds=0)
