"""Memory: four times the tokens, four times the largest tensor, where a method is linear."""

import pytest
import torch

import sparing
from tests.support.allocations import largest_tensor
from tests.support.inputs import make, run


def growth(spec, impl, causal):
    """The largest tensor of a forward and a backward pass at 4096 tokens over that at 1024, one head."""
    method = sparing.method(spec)
    sizes = []
    for n in (1024, 4096):
        x = make(method, batch=1, heads=1, n_q=n, d=16, e=16).map(lambda t: t.requires_grad_())
        sizes.append(largest_tensor(lambda x=x: run(method, x, impl=impl, is_causal=causal).sum().backward()))
    return sizes[1] / sizes[0]


LINEAR = [
    ("kernel(kind=elu)", False),
    ("kernel(kind=elu)", True),
    ("random_features(features=64)", False),
    ("random_features(features=64)", True),
    ("skyformer(landmarks=32)", False),
    ("nystrom(landmarks=32)", False),
    ("linformer(rank=32)", False),
]


@pytest.mark.parametrize(("spec", "causal"), LINEAR)
def test_the_largest_tensor_grows_with_the_length(spec, causal):
    found = growth(spec, "auto", causal)
    assert found <= 4.3, f"{spec}, causal={causal}: the largest tensor grows {found:.1f} times"


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("spec", ["kernel(kind=elu)", "random_features(features=64)"])
def test_the_dense_reference_does_not_pass(spec, causal):
    assert growth(spec, "reference", causal) > 10


def test_one_quadratic_tensor_is_seen():
    """The control of the tool: a product of n x n is found although nothing keeps it."""
    x = torch.ones(300, 2)
    assert largest_tensor(lambda: (x @ x.mT).sum()) == 300 * 300
