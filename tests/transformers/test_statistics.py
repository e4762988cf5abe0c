"""What a run has done: sampling rates on valid tokens, FLOPs the paper's way and honestly."""

import pytest
import torch

import sparing
from sparing.transformers.watch import record_calls
from tests.support.model_zoo import build, inputs, run


def padded(length, valid):
    given = inputs("bert", length)
    given["attention_mask"][:] = 0
    for row, n in zip(given["attention_mask"], valid):
        row[:n] = 1
    return given


def test_rates_are_those_of_the_calls():
    model, given = build("bert"), padded(24, (17, 9))
    first = record_calls(model, "monte_carlo", lambda: model(**given))[0]
    mask = given["attention_mask"].bool()
    facts = sparing.inspect(
        first.query,
        first.key,
        first.value,
        mask[:, None, None],
        method="monte_carlo(alpha=0.5)",
        seed=3,
        streams=[0, 1, 2, 3],
    ).statistics
    wanted = (17 * facts["rate"][0].mean() + 9 * facts["rate"][1].mean()) / 26
    with sparing.approximate(model, "monte_carlo(alpha=0.5)", seed=3) as handle:
        run(model, given)
        found = handle.statistics().layers[0]
    assert found.name == "encoder.layer.0.attention.self"
    assert found.calls == 1
    assert found.rate == pytest.approx(float(wanted), rel=1e-9)
    assert 0.02 < found.rate < 0.9
    assert found.paper_rate == pytest.approx(float(facts["padded_rate"].mean()), rel=1e-9)
    assert found.padding_reduction == pytest.approx(48 / 26)


def test_padding_is_not_counted_as_a_saving():
    """Exact attention on short texts that are padded: the paper's way of counting calls that a gain of six times."""
    model, given = build("bert"), padded(60, (10, 10))
    with sparing.approximate(model, "monte_carlo(alpha=0)") as handle:
        run(model, given)
        total = handle.statistics().total
    assert total.paper_reduction == pytest.approx(6.0)
    assert total.padding_reduction == pytest.approx(6.0)
    assert total.rate == total.projection_reduction == total.reduction == 1.0


def test_the_whole_attention_saves_less_than_its_projection():
    model, given = build("bert"), padded(60, (60, 30))
    rates = []
    for alpha in (0.2, 0.5, 2.0):
        with sparing.approximate(model, f"monte_carlo(alpha={alpha})") as handle:
            run(model, given)
            total = handle.statistics().total
        assert 1 < total.reduction < total.projection_reduction < total.paper_reduction
        rates.append(total.rate)
    assert rates == sorted(rates, reverse=True)


def test_causal_sampling_does_not_hide_its_products():
    """Each row has counts of its own, so A H is computed several times: more work than exact attention, and said so."""
    model, given = build("llama"), inputs("llama")
    with sparing.approximate(model, "monte_carlo(alpha=0.5)") as handle, torch.no_grad():
        model(**given, use_cache=False)
        total = handle.statistics().total
    assert total.rate < 1
    assert total.reduction < 1 < total.projection_reduction


def test_longformer_counts_the_values_that_it_samples():
    model, given = build("longformer"), padded(24, (24, 8))
    given["global_attention_mask"] = torch.zeros_like(given["input_ids"])
    given["global_attention_mask"][:, 0] = 1
    found = []
    for alpha in (0.0, 0.5, 2.0):
        with sparing.approximate(model, f"monte_carlo(alpha={alpha})") as handle:
            run(model, given)
            found.append(handle.statistics().total)
        assert found[-1].calls == 2
        assert found[-1].padding_reduction == pytest.approx(48 / 32)
    assert found[0].rate == found[0].reduction == 1
    assert found[0].paper_reduction == pytest.approx(48 / 32)
    assert 1 > found[1].rate > found[2].rate > 0
    assert 1 < found[1].reduction < found[1].projection_reduction < found[1].paper_reduction


def test_calls_are_counted_and_can_start_again():
    model, given = build("llama"), inputs("llama")
    given.pop("position_ids")
    with sparing.approximate(model, {1: "window(size=4)"}) as handle:
        model.generate(**given, max_new_tokens=5, do_sample=False)
        kept = handle.statistics(reset=True)
        (layer,) = kept.layers
        assert (layer.calls, layer.steps, layer.exact_calls) == (1, 4, 0)
        assert layer.rate is layer.paper_reduction is None
        (layer,) = handle.statistics().layers
        assert (layer.calls, layer.steps, layer.exact_calls) == (0, 0, 0)
        run(model, given)
        assert handle.statistics().layers[0].calls == 1
        assert kept.layers[0].calls == 1, "what was returned does not change"


def test_flops_are_those_of_the_method():
    model, given = build("bert"), padded(60, (60, 30))
    with sparing.approximate(model, "nystrom(landmarks=4)", layers=0) as handle:
        run(model, given)
        (layer,) = handle.statistics().layers
    shapes = [sparing.Shape(heads=4, queries=n, keys=n, head_dim=16, value_dim=16) for n in (60, 30)]
    exact, own = (sum(sparing.method(m).cost(s).flops for s in shapes) for m in ("exact", "nystrom(landmarks=4)"))
    assert layer.reduction == pytest.approx(exact / own)


def test_it_prints_a_table():
    model = build("bert")
    with sparing.approximate(model, "monte_carlo(alpha=0.5)") as handle:
        run(model, inputs("bert"))
        lines = str(handle.statistics()).splitlines()
    assert lines[0].split()[:4] == ["layer", "method", "calls", "steps"]
    assert [line.split()[0] for line in lines[1:]] == [
        "encoder.layer.0.attention.self",
        "encoder.layer.1.attention.self",
        "total",
    ]
