"""The choices of Monte-Carlo attention: which weights set the sample counts, and p of eq. 4 in place of eq. 6."""

import math

import pytest
import torch

import sparing
from sparing import Projection, Unsupported, native
from sparing.methods.monte_carlo import estimator
from sparing.methods.monte_carlo.method import MonteCarlo
from sparing.methods.monte_carlo.sampling import feature_law, input_law
from tests.methods.test_monte_carlo import CHOICES, exact, many, problem, spec
from tests.support.kernel_checks import needs_kernels
from tests.support.random_estimates import assert_second_moment, assert_unbiased

IMPORTANCE = ["max", "mean", "median"]
PROBABILITIES = ["weight", "input"]


def chosen(alpha, importance="max", probabilities="weight", more=""):
    return spec(alpha, f", importance={importance}, probabilities={probabilities}{more}")


def uneven(**sizes):
    """Inputs whose features differ in size by token and feature, which eq. 4 looks at and eq. 6 does not."""
    q, k, value = problem(**sizes)
    return q, k, value._replace(x=value.x * torch.logspace(0, 1.5, value.x.shape[-1], dtype=torch.float64).flip(0))


def counts_of(*call, **kwargs):
    return sparing.inspect(*call, seed=0, **kwargs).statistics["counts"]


@pytest.mark.parametrize("importance", IMPORTANCE)
def test_counts_follow_the_weights_of_the_valid_queries_of_the_group(importance):
    q, k, value = problem(n=12, heads=4, kv_heads=2, batch=2)
    keep = torch.arange(12) < torch.tensor([[12], [7]])
    q = q.masked_fill(~keep[:, None, :, None], 50.0)  # padded queries that stare at one key
    counts = counts_of(q, k, value, keep[:, None, None], enable_gqa=True, method=chosen(2.0, importance))
    of = {"max": torch.amax, "mean": torch.mean, "median": lambda w, dim: w.median(dim).values}[importance]
    for b, n in enumerate((12, 7)):
        weights = (q[b, :, :n] @ k[b].repeat_interleave(2, 0)[:, :n].mT / math.sqrt(8)).softmax(-1)
        received = of(weights.unflatten(0, (2, 2)).flatten(1, 2), 1)
        assert torch.equal(counts[b, :, :n], (n * received / 2.0).square().ceil().clamp_max(48).long())
        assert bool((counts[b, :, n:] == 0).all())


@pytest.mark.parametrize("sharpness", [0.5, 3.0, 40.0])
def test_mean_and_median_take_fewer_samples(sharpness):
    call = problem(n=24, heads=4, kv_heads=2, batch=2, sharpness=sharpness)
    mask = torch.rand(2, 1, 24, 24, generator=torch.Generator().manual_seed(0)) < 0.7
    most, mean, median = (counts_of(*call, mask, enable_gqa=True, method=chosen(2.0, i)) for i in IMPORTANCE)
    for fewer in (mean, median):
        assert bool((fewer <= most).all())
        assert int(fewer.sum()) < 0.9 * int(most.sum())
        assert torch.equal(fewer > 0, most > 0)


def rarely_read():
    """Two of eight queries alone see the last keys, whose median weight is 0."""
    q, k, value = uneven(n=8, d=24, e=4)
    mask = torch.ones(8, 8, dtype=torch.bool)
    mask[:6, 6:] = False
    return q, k, value, mask


def draws_of(q, k, value, mask, method, draws=3000):
    v = Projection(value.x, value.weight.repeat(draws, 1), value.bias.repeat(draws))
    q, k = (t.expand(1, draws, -1, -1) for t in (q, k))
    return sparing.attention(q, k, v, mask, method=method, seed=0, query_mask=torch.ones(1, 8, dtype=torch.bool))[0]


@pytest.mark.statistical
@pytest.mark.parametrize("samples", ["", ", samples=shared", ", estimator=stratified"])
@pytest.mark.parametrize("probabilities", PROBABILITIES)
@pytest.mark.parametrize("importance", IMPORTANCE)
def test_every_choice_is_unbiased(importance, probabilities, samples):
    """H0: E e_i = 0. 3000 draws, z along 16 directions, at the limit of `random_estimates` (1e-6 for 100 of them)."""
    q, k, value, mask = rarely_read()
    found = draws_of(q, k, value, mask, chosen(2.0, importance, probabilities, samples))
    wanted = exact(q, k, value, attn_mask=mask)[0]
    assert float((found[0] - wanted).abs().max()) > 1e-3
    assert_unbiased(found - wanted)


@pytest.mark.statistical
def test_the_median_needs_one_sample_for_each_token_that_is_read(monkeypatch):
    """Control: without it, tokens that most queries do not see would be left out."""
    q, k, value, mask = rarely_read()
    everyone = torch.ones(1, 8, dtype=torch.bool)
    method = chosen(2.0, "median")
    assert counts_of(q, k, value, mask, method=method, query_mask=everyone)[0, 0, 6:].tolist() == [1, 1]
    count = estimator.Estimator.count
    monkeypatch.setattr(estimator.Estimator, "count", lambda self, m, tokens, d, read=None: count(self, m, tokens, d))
    assert counts_of(q, k, value, mask, method=method, query_mask=everyone)[0, 0, 6:].tolist() == [0, 0]
    with pytest.raises(AssertionError, match="biased"):
        assert_unbiased(draws_of(q, k, value, mask, method) - exact(q, k, value, attn_mask=mask)[0])


def variances(value, counts, law):
    """V_j = (sum_k x_jk^2 |W[k]|^2 / p(k) - |x_j W|^2) / r_j of sampled tokens, 0 of exact ones; (n,)."""
    x, w = value.x[0], value.weight.mT
    terms = torch.where(law > 0, w.square().sum(-1) / law, 0.0)
    return (x.square() @ terms - (x @ w).square().sum(-1)) / counts.clamp_min(1) * (counts < x.shape[-1])


def law_of(value, probabilities):
    valid = torch.ones(1, 1, value.x.shape[1], dtype=torch.bool)
    return MonteCarlo(probabilities=probabilities)._estimator.law(value, valid).view(-1)


@pytest.mark.parametrize("importance", IMPORTANCE)
@pytest.mark.parametrize("probabilities", PROBABILITIES)
@pytest.mark.parametrize("sharpness", [0.0, 1.0, 5.0])
def test_the_certificate_holds_for_every_choice(sharpness, probabilities, importance):
    q, k, value = uneven(sharpness=sharpness)
    facts = sparing.inspect(q, k, value, method=chosen(1.0, importance, probabilities), seed=0).statistics
    weights = (q[0, 0] @ k[0, 0].mT / math.sqrt(8)).softmax(-1)
    rms = weights @ variances(value, facts["counts"][0, 0], law_of(value, probabilities)).sqrt()
    assert bool((rms <= facts["certificate"][0, 0] * (1 + 1e-9)).all())
    assert bool((facts["certificate"] < 10 * rms + 1e-9).all())


def test_the_bound_is_claimed_only_where_it_is_proven():
    """One query reads token 0 alone and seven do not: with mean and median its row is wrong by more than the bound."""
    w = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(4)[:, None]
    q = torch.zeros(1, 1, 8, 4, dtype=torch.float64)
    q[..., 0, 0] = 1e3
    k = torch.zeros_like(q)
    k[..., 0, 0], k[..., 1:, 1] = 1.0, 1.0
    q[..., 1:, 1] = 1e3
    value = Projection(torch.ones(1, 8, 8, dtype=torch.float64), w.mT.contiguous(), None)  # x W = 0
    alpha = 1.0
    bound = alpha * float(value.x[0].norm(dim=-1).mean() * value.weight.norm())
    for importance in IMPORTANCE:
        for probabilities in PROBABILITIES:
            method = chosen(alpha, importance, probabilities, ", samples=shared")
            found = [sparing.inspect(q, k, value, method=method, seed=seed) for seed in range(100)]
            proven = importance == "max" and probabilities == "weight"
            assert ("bound" in found[0].statistics) == proven
            rms = torch.stack([f.output[0, 0].norm(dim=-1) for f in found]).square().mean(0).sqrt()
            if proven:
                torch.testing.assert_close(found[0].statistics["bound"], torch.full((1, 1), bound).double())
                assert float(rms.max()) < bound
            assert float(rms[0]) <= 1.25 * float(found[0].statistics["certificate"][0, 0, 0])
    few = sparing.inspect(q, k, value, method=chosen(4.0, "mean", "weight", ", samples=shared"), seed=0)
    assert float(few.output[0, 0, 0].norm()) > 0.99 * float(few.statistics["certificate"][0, 0, 0])


def assert_least(law, value):
    """No p has a smaller sum_j V_j at equal counts: not eq. 6, not uniform p, and none of 300 close to the given."""
    counts = torch.ones(value.x.shape[1], dtype=torch.long)
    least = float(variances(value, counts, law).sum())
    gen = torch.Generator().manual_seed(3)
    others = [law_of(value, "weight"), torch.full_like(law, 1 / len(law))]
    for size in (1e-3, 1e-2, 0.1):
        near = law * torch.exp(size * torch.randn(100, len(law), generator=gen, dtype=torch.float64))
        others += list(near / near.sum(-1, keepdim=True))
    found = [float(variances(value, counts, other).sum()) for other in others]
    assert least <= min(found) * (1 + 1e-12), f"another p has {min(found) / least:.4f} times the error"
    return found[0] / least


def test_eq_4_has_the_least_expected_error_on_its_input():
    _, _, value = uneven()
    assert assert_least(law_of(value, "input"), value) > 1.3  # what eq. 6 has more
    broken = [law_of(value, "weight"), law_of(value._replace(x=value.x.flip(-1)), "input")]
    for law in broken:  # controls: eq. 6, and eq. 4 of another input
        with pytest.raises(AssertionError, match="another p"):
            assert_least(law, value)


@pytest.mark.statistical
def test_the_second_moment_is_that_of_eq_4():
    """H0: E|e_i|^2 = sum_j A_ij^2 V_j with p of eq. 4; eq. 6 has more, by measurement too."""
    q, k, value = uneven(sharpness=0.0)
    method = chosen(0.3, "max", "input")
    counts = counts_of(q, k, value, method=method)[0, 0]
    assert counts.unique().tolist() == [12]  # flat weights: eq. 4 is the optimum
    wanted = exact(q, k, value)[0]
    errors = many(q, k, value, method) - wanted
    predicted = {p: variances(value, counts, law_of(value, p)).sum().expand(16) / 16**2 for p in PROBABILITIES}
    assert_second_moment(errors, predicted["input"])
    with pytest.raises(AssertionError, match="second moment"):  # control
        assert_second_moment(errors, predicted["weight"])
    other = many(q, k, value, chosen(0.3)) - wanted
    assert float(other.square().sum(-1).mean()) > 1.2 * float(errors.square().sum(-1).mean())


def test_eq_4_is_that_of_the_valid_tokens_of_each_item():
    _, _, value = uneven(n=6, heads=2, batch=2)
    valid = (torch.arange(6) < torch.tensor([[6], [4]]))[:, None].expand(2, 2, 6)
    w = value.weight.unflatten(0, (2, -1)).mT
    found = input_law(value.x, valid, w)
    for b, n in enumerate((6, 4)):
        for h in range(2):
            sizes = value.x[b, :n].norm(dim=0) * w[h].norm(dim=-1)
            torch.testing.assert_close(found[b, h], sizes / sizes.sum(), rtol=1e-12, atol=0)
    for size in (1e-150, 1e150):
        torch.testing.assert_close(input_law(value.x * size, valid, w * size), found)
    assert torch.equal(input_law(value.x * 0, valid, w), torch.zeros(2, 2, 48, dtype=torch.float64))


@pytest.mark.parametrize("setting", CHOICES)
def test_padding_and_batch_mates_change_nothing(setting):
    q, k, value = uneven(n=20, heads=2, batch=2)
    keep = torch.arange(20) < torch.tensor([[20], [12]])
    both = sparing.attention(q, k, value, keep[:, None, None], method=spec(2.0, setting), seed=0)
    cut = value._replace(x=value.x[1:, :12])
    alone = sparing.attention(q[1:, :, :12], k[1:, :, :12], cut, method=spec(2.0, setting), seed=0)
    torch.testing.assert_close(both[1:, :, :12], alone, rtol=1e-12, atol=1e-12)


@needs_kernels
@pytest.mark.parametrize("setting", CHOICES)
def test_kernels_and_causal_calls_decline(setting):
    q, k, value = problem(n=6)
    with pytest.raises(Unsupported, match=r"kernels of monte_carlo.* do not cover this call"):
        sparing.attention(q, k, value, method=spec(1.0, setting), impl="native")
    with pytest.raises(Unsupported, match="is_causal=True"):
        sparing.attention(q, k, value, method=spec(1.0, setting), is_causal=True)


def test_values_for_attention_that_others_compute(monkeypatch):
    """`values` draws by eq. 4 where it is asked to, with and without kernels."""
    _, _, value = uneven(n=10, heads=2)
    valid = torch.ones(1, 2, 10, dtype=torch.bool)
    received = torch.full((1, 2, 10), 0.1, dtype=torch.float64)
    draws = sparing.draws.Draws(3, torch.arange(2))
    method = MonteCarlo(alpha=0.3, probabilities="input")
    found, counts = method.values(value, received, valid, draws)
    with native.switched_off():
        plain, _ = method.values(value, received, valid, draws)
    assert counts.unique().tolist() == [12]
    assert torch.equal(found, plain)
    law = feature_law(value.weight.unflatten(0, (2, -1)).mT)
    monkeypatch.setattr(estimator, "input_law", lambda *args: law.expand(1, -1, -1))
    assert not torch.allclose(method.values(value, received, valid, draws)[0], found)


@torch.no_grad()
def test_real_layers(minilm_layers):
    """On MiniLM eq. 4 has a smaller error at the same work; the mean takes fewer samples at the same alpha, and errs."""
    found = {}
    for setting in ("", ", probabilities=input", ", importance=mean", ", importance=median"):
        errors, rates = [], []
        for layer in minilm_layers:
            wanted = sparing.attention(layer.query, layer.key, layer.value)
            one = sparing.inspect(layer.query, layer.key, layer.value, method=spec(0.2, setting), seed=0)
            errors.append(float((one.output - wanted).norm() / wanted.norm()))
            rates.append(float(one.statistics["rate"].mean()))
        found[setting] = sum(errors) / len(errors), sum(rates) / len(rates)
    plain, by_input, mean, median = found.values()
    assert by_input[0] < 0.9 * plain[0], found
    assert by_input[1] == plain[1], found
    assert median[1] < mean[1] < 0.2 * plain[1], found
    assert min(median[0], mean[0]) > 5 * plain[0], found
