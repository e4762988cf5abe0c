"""KeyClusters attention: what a query spends, and the error bar that comes with the result."""

import pytest
import torch
from torch import Tensor

import sparing
from sparing.methods.key_clusters import method as module
from sparing.methods.key_clusters.method import KeyClusters, expand
from sparing.workbench.metrics import rank_correlation
from tests.support.inputs import Inputs, exact_for, peaked, relative

CAUSAL = pytest.mark.parametrize("causal", [False, True])


@CAUSAL
@pytest.mark.parametrize("spec", ["", "window=0, ", "sinks=5, window=10, ", "select=mass, ", "clusters=0.3, keys=20, "])
def test_no_query_spends_more_than_its_budget(spec, causal, monkeypatch):
    m = sparing.method(f"key_clusters({spec}chunk=16{'' if 'clusters' in spec else ', clusters=6, keys=9'})")
    assert isinstance(m, KeyClusters)
    spent = []

    def watched(worth: Tensor, size: Tensor, budget: int) -> Tensor:
        chosen = expand(worth, size, budget)
        spent.append((size * chosen).sum(-1))
        return chosen

    monkeypatch.setattr(module, "expand", watched)
    x = peaked(m, 4, n=90)
    touched = sparing.inspect(x.q, x.k, x.value, method=m, is_causal=causal, seed=0, impl="reference").statistics[
        "touched"
    ]
    assert 0 < max(float(each.max()) for each in spent) <= m.keys
    near = m.window + 1 + (m.sinks + 4 if causal else 2 * m.sinks)
    each = m.clusters_of(16 if causal else 90)
    summaries = each * (90 // 16) + 3 * -(-each // 4) if causal else each
    assert int(touched.max()) <= m.keys + near + summaries
    assert float(touched.double().mean()) > 0.5 * m.keys, "and it does spend it"


def test_expansion_takes_the_best_that_still_fits():
    worth = torch.tensor([[5.0, 4.0, 3.0, 0.0, 1.0]])
    size = torch.tensor([[3.0, 2.0, 2.0, 1.0, 1.0]])
    wanted = {
        0: [],
        1: [4],
        2: [1],
        3: [0],
        4: [0, 4],
        5: [0, 1],
        6: [0, 1, 4],
        7: [0, 1, 2],
        8: [0, 1, 2, 4],
        99: [0, 1, 2, 4],
    }
    for budget, chosen in wanted.items():
        assert expand(worth, size, budget)[0].nonzero().flatten().tolist() == chosen


def wandering(n: int, seed: int) -> Inputs:
    """Tokens of a topic that drifts, seen through random projections: neighbours resemble each other, as in text."""
    gen = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(1, 2, *shape, generator=gen, dtype=torch.float64)

    topic = draw(n, 16)
    for t in range(1, n):
        topic[:, :, t] = 0.9 * topic[:, :, t - 1] + 0.19**0.5 * topic[:, :, t]
    q, k, v = (topic @ draw(16, 16) / 4 + size * draw(n, 16) for size in (0.5, 0.5, 0.3))
    return Inputs(2 * (q + draw(1, 16)), k + draw(1, 16), v)


@CAUSAL
@pytest.mark.parametrize("data", [wandering, lambda n, seed: peaked(KeyClusters(), 4, n=n, seed=seed)])
def test_the_error_bar_follows_the_error(data, causal):
    """Fixed seeds, hence no false alarm; a shuffled bar reaches 0.2 in one case of 500 at most (256 rows or more)."""
    for seed in range(3):
        x = data(256, seed)
        found = sparing.inspect(
            x.q, x.k, x.value, method="key_clusters(clusters=32, keys=64, chunk=64)", seed=0, is_causal=causal
        )
        wanted = exact_for(x, is_causal=causal)
        bar, wrong = found.statistics["error"], (found.output - wanted).norm(dim=-1)
        some = bar > 0
        assert int(some.sum()) >= 256
        assert relative(found.output, wanted) > 1e-4, "an error of zero would be easy to predict"
        assert rank_correlation(bar[some], wrong[some]) > 0.8
        order = torch.randperm(int(some.sum()), generator=torch.Generator().manual_seed(seed))
        assert abs(rank_correlation(bar[some][order], wrong[some])) < 0.2
        assert float(wrong[~some].max() if bool((~some).any()) else 0.0) < 1e-10


def test_the_error_bar_follows_the_error_of_real_layers(minilm_layers):
    """On the average over layers; the bar is worst in the first."""
    found = []
    for layer in minilm_layers:
        q, k, v = (t.detach().double() for t in (layer.query, layer.key, layer.value.project(12)))
        ours = sparing.inspect(q, k, v, method="key_clusters(clusters=16, keys=16)", seed=0)
        wrong = (ours.output - exact_for(Inputs(q, k, v))).norm(dim=-1)
        found.append(rank_correlation(ours.statistics["error"].flatten(), wrong.flatten()))
    assert sum(found) / len(found) > 0.8
    assert min(found) > 0.6
