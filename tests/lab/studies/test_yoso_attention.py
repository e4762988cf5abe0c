import pytest
import torch

from sparing.transformers.watch import ObservedCall
from sparing_lab.studies.study import Settings
from sparing_lab.studies.yoso_attention import HASHES, STUDY, compare, matrices, softmax
from tests.support.verdicts import changed, verdict

NAME = "yoso-attention"
CORRELATIONS = ("with expectation", "with softmax", "with own softmax")


def rows(power=-0.5, correlation=0.95):
    numbers = [
        {"hashes": m, "error": m**power if m else 0.0, **dict.fromkeys(CORRELATIONS, correlation)}
        for m in (*HASHES, None)
    ]
    return [{"what": "numbers", "layer": layer, **row} for layer in range(2) for row in numbers]


def seen(length=32):
    random = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, length, 16, generator=random).unbind(0)
    return ObservedCall("layer", q, k, v, {"scale": 0.25})


def test_an_error_that_falls_as_the_root_reproduces():
    assert verdict(NAME, "accuracy", rows()) == "reproduces"
    assert verdict(NAME, "accuracy", rows(power=-0.3)) == "same shape"
    assert verdict(NAME, "accuracy", changed(rows(), lambda row: row["hashes"] == 64, error=1.0)) == "does not"


@pytest.mark.parametrize(("key", "name"), [("patterns", "with softmax"), ("own", "with own softmax")])
def test_patterns_must_correlate(key, name):
    assert verdict(NAME, key, rows()) == "reproduces"
    assert verdict(NAME, key, changed(rows(), lambda row: row["hashes"] == 128, **{name: 0.8})) == "same shape"
    assert verdict(NAME, key, changed(rows(), lambda row: row["hashes"] == 128, **{name: 0.5})) == "does not"


def test_matrices_are_shares_of_hashes_and_their_probability():
    call = seen()
    sampled, wanted = matrices(call, 8), matrices(call, None)
    assert torch.allclose(sampled * 8, (sampled * 8).round(), atol=1e-5)
    cosine = torch.nn.functional.cosine_similarity(call.query[0, 1, 3], call.key[0, 1, 7], dim=0)
    assert float(wanted[0, 1, 3, 7]) == pytest.approx(float((1 - cosine.arccos() / torch.pi) ** 5), rel=1e-4)
    assert float((matrices(call, 8192) - wanted).norm() / wanted.norm()) < 0.3


def test_softmax_is_that_of_the_layer_or_of_unit_vectors():
    call = seen()
    own = (call.query @ call.key.mT * 0.25).softmax(-1)
    assert torch.allclose(softmax(call, unit=False), own, atol=1e-6)
    q, k = (x / x.norm(dim=-1, keepdim=True) for x in (call.query, call.key))
    assert torch.allclose(softmax(call, unit=True), (5 * q @ k.mT).softmax(-1), atol=1e-6)


def test_the_expectation_agrees_with_itself_and_more_hashes_with_it():
    found = {row["hashes"]: row for row in compare(seen(), 2)}
    assert found[None]["error"] == 0
    assert found[None]["with expectation"] == pytest.approx(1)
    assert found[256]["error"] < 0.3 * found[8]["error"]
    assert found[8]["with expectation"] < found[256]["with expectation"] < 1


def test_the_scales_name_their_models():
    assert [cell["model"] for cell in STUDY.cells(Settings())] == ["minilm"]
    assert [cell["model"] for cell in STUDY.cells(Settings("paper"))] == ["uw-madison/yoso-4096"]
    assert STUDY.cells(Settings(seeds=7))[0]["draws"] == 7
