"""The kernels of `monte_carlo` against the specification, for every instruction set of the machine."""

import pytest
import torch

import sparing
from sparing import Projection, native
from sparing.draws import Draws
from sparing.methods.monte_carlo.native import received, sampled_projection
from sparing.methods.monte_carlo.sampling import Lists, draw_features, feature_law, sampled_product
from tests.support.allocations import largest_tensor
from tests.support.inputs import keys_mask, padding
from tests.support.kernel_checks import every_instruction_set, needs_kernels, no_worse, same_for_any_threads

pytestmark = needs_kernels

SEED = 2**64 - 5  # all 64 bits matter
LISTS = [(shared, stratified) for shared in (False, True) for stratified in (False, True)]


def inputs(n, d, e, batch=2, heads=3):
    """x, weight with rows of very unequal size and a zero feature, bias; counts with exact and empty tokens, ranks."""
    gen = torch.Generator().manual_seed(n + d + e)
    x, bias = torch.randn(batch, n, d, generator=gen), torch.randn(heads * e, generator=gen)
    weight = torch.randn(heads * e, d, generator=gen) * torch.logspace(0, -1, d)
    weight[:, d // 3] *= d == 1
    counts = torch.randint(0, d + 1, (batch, heads, n), generator=gen)
    counts[..., ::4], counts[..., 1::5] = d, 0
    ranks = torch.rand(batch, heads, n, generator=gen).argsort(-1)
    return x, weight, bias, counts, ranks


def draws_of(heads):
    return Draws(SEED, torch.arange(heads) * 7 + 2**31)


def by_kernel(counts, ranks, shared, stratified):
    draws = draws_of(counts.shape[1])

    def compute(x, weight, bias):
        lists = Lists(ranks=ranks, draws=draws, shared=shared, stratified=stratified)
        return sampled_projection(x, weight, bias, counts, lists)

    return compute


def by_specification(counts, ranks, shared, stratified):
    draws, heads = draws_of(counts.shape[1]), counts.shape[1]

    def compute(x, weight, bias):
        w = weight.unflatten(0, (heads, -1)).mT
        law = feature_law(w)
        picks = draw_features(law, counts, Lists(ranks=ranks, draws=draws, shared=shared, stratified=stratified))
        rough = sampled_product(x.unsqueeze(1), w, law, picks, counts)
        exact = (counts == x.shape[-1]).unsqueeze(-1)
        return torch.where(exact, x.unsqueeze(1) @ w, rough) + bias.view(heads, 1, -1)

    return compute


@every_instruction_set
@pytest.mark.parametrize(("shared", "stratified"), LISTS)
@pytest.mark.parametrize(("n", "d", "e"), [(1, 1, 1), (50, 70, 20), (67, 200, 64), (33, 17, 80), (40, 33, 200)])
def test_the_same_samples_and_no_worse_than_plain_float32(isa, n, d, e, shared, stratified):
    """In float64 another sample would show: each adds a row of W."""
    *tensors, counts, ranks = inputs(n, d, e)
    how = counts, ranks, shared, stratified
    with native.instruction_set(isa):
        wide = [t.double() for t in tensors]
        torch.testing.assert_close(by_kernel(*how)(*wide), by_specification(*how)(*wide), rtol=1e-11, atol=1e-11)
        no_worse(by_kernel(*how), by_specification(*how), tensors, what=isa, gradients=False)


@every_instruction_set
def test_lists_far_down_the_stream(isa):
    """Ranks whose draws are numbered beyond 2^32 and 2^34, where the generator's counter has a second word."""
    x, weight, _, _, _ = (t.double() for t in inputs(5, 12, 4, batch=1, heads=1))
    ranks, counts = torch.tensor([[[1, 2**31 // 12, 2**34 // 12 + 1, 2**36, 2**37 + 3]]]), torch.full((1, 1, 5), 7)
    draws = draws_of(1)
    index = ranks.squeeze(0).unsqueeze(-1) * 12 + torch.arange(12)  # the first seven are used
    ladder = feature_law(weight.mT).cumsum(-1)
    picks = torch.searchsorted(ladder / ladder[-1], draws.uniform_at("monte_carlo.independent", index))
    with native.instruction_set(isa):
        found = by_kernel(counts, ranks, False, False)(x, weight, None)
    wanted = sampled_product(x.unsqueeze(1), weight.mT[None], feature_law(weight.mT)[None], picks[None], counts)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("shared", "stratified"), LISTS)
@pytest.mark.parametrize("size", [0.0, 1e-200, 1e150])
def test_extreme_weights(shared, stratified, size):
    x, weight, bias, counts, ranks = (t.double() if t.is_floating_point() else t for t in inputs(20, 9, 3))
    found = by_kernel(counts, ranks, shared, stratified)(x, weight * size, bias)
    wanted = by_specification(counts, ranks, shared, stratified)(x, weight * size, bias)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@every_instruction_set
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("n_q", "n_k", "d"), [(1, 1, 1), (65, 130, 20), (200, 63, 80), (130, 100, 128)])
def test_what_keys_receive(isa, n_q, n_k, d, masked):
    gen = torch.Generator().manual_seed(n_q)
    q, k = (1.5 * torch.randn(2, 2, n, d, generator=gen) for n in (n_q, n_k))
    keep = counted = None
    if masked:
        keep, counted = (torch.rand(2, n, generator=gen) < 0.7 for n in (n_k, n_q))
        keep[1] = n_k == 1  # an item without keys
    scale = d**-0.5

    def specification(q, k):
        scores = q @ k.mT * scale
        if keep is not None:
            scores = scores.masked_fill(~keep[:, None, None], -torch.inf)
        weights = scores.softmax(-1).nan_to_num(0.0)
        if counted is not None:
            weights = weights.masked_fill(~counted[:, None, :, None], 0.0)
        return weights.amax(2), scores.logsumexp(-1)

    with native.instruction_set(isa):
        no_worse(lambda q, k: received(q, k, keep, counted, scale), specification, [q, k], what=isa, gradients=False)


def test_equal_weights_are_exact():
    """1 / N to the bit: where N M / alpha is a whole number, the number of samples must not be rounded up."""
    for n in (3, 7, 100):
        q = torch.zeros(1, 1, n, 4)
        assert torch.equal(received(q, q, None, None, 1.0)[0], torch.full((1, 1, n), 1 / n))


SETTINGS = ["", ", samples=shared", ", estimator=stratified", ", estimator=drop", ", estimator=mean"]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("setting", SETTINGS)
def test_the_whole_method_through_the_door(setting, bias):
    """Also its gradients, for which counts and samples are constants."""
    gen = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 4, 70, 16, generator=gen), torch.randn(2, 2, 90, 16, generator=gen)
    value = [torch.randn(*shape, generator=gen) for shape in ((2, 90, 48), (2 * 16, 48), (2 * 16,))[: 2 + bias]]
    mask = keys_mask(padding("holes", 2, 90))
    rates = []

    def facts(impl):
        def compute(q, k, *value):
            found = sparing.inspect(q, k, Projection(*value), mask, impl=impl, **call)
            rates.append(float(found.statistics["rate"].mean()))
            return found.output, found.lse, found.statistics["certificate"], found.statistics["counts"].to(q.dtype)

        return compute

    def output(impl):
        return lambda q, k, *value: sparing.attention(q, k, Projection(*value), mask, impl=impl, **call)

    call = {"method": f"monte_carlo(alpha=1.7{setting})", "seed": 3, "enable_gqa": True}
    no_worse(facts("native"), facts("reference"), [q, k, *value], what=setting, gradients=False)
    no_worse(output("native"), output("reference"), [q, k, *value], what=setting)
    assert 0.1 < min(rates) <= max(rates) < 0.9


def test_a_gradient_asks_for_no_other_and_changes_no_bit():
    gen = torch.Generator().manual_seed(0)
    q = torch.randn(1, 2, 30, 8, generator=gen)
    x, weight, bias = (torch.randn(*shape, generator=gen) for shape in ((1, 30, 20), (16, 20), (16,)))
    call = {"method": "monte_carlo(alpha=2.0)", "seed": 0, "impl": "native"}
    plain = sparing.attention(q, q, Projection(x, weight, bias), **call)
    for i in range(3):
        leaves = [t.clone().requires_grad_(i == j) for j, t in enumerate((x, weight, bias))]
        out = sparing.attention(q, q, Projection(*leaves), **call)
        assert torch.equal(out, plain)
        out.sum().backward()
        assert [t.grad is not None for t in leaves] == [i == j for j in range(3)]


def test_no_matrix_of_all_pairs_is_made():
    gen = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 1, 2048, 16, generator=gen)
    value = Projection(torch.randn(1, 2048, 24, generator=gen), torch.randn(16, 24, generator=gen))

    def run(impl):
        options = {"method": "monte_carlo(alpha=2.0)", "seed": 0, "impl": impl}
        return largest_tensor(lambda: sparing.inspect(q, k, value, **options))

    assert run("native") < 2048 * 64
    assert run("reference") >= 2048**2


@pytest.mark.parametrize(("shared", "stratified"), LISTS)
def test_thread_counts_change_nothing(shared, stratified):
    x, weight, bias, counts, ranks = inputs(300, 60, 40)
    same_for_any_threads(lambda: [by_kernel(counts, ranks, shared, stratified)(x, weight, bias)])
    q, k = x[:1].unsqueeze(1), x[1:].unsqueeze(1)
    same_for_any_threads(lambda: received(q, k, None, None, 0.2))


def test_batch_mates_change_no_bit():
    """Tokens of all items are sorted together, by count."""
    x, weight, bias, counts, ranks = inputs(90, 60, 40)
    for shared, stratified in LISTS:
        whole = by_kernel(counts, ranks, shared, stratified)(x, weight, bias)
        for b in range(2):
            one = slice(b, b + 1)
            assert torch.equal(by_kernel(counts[one], ranks[one], shared, stratified)(x[one], weight, bias), whole[one])


def test_opcheck():
    x, weight, bias, counts, ranks = inputs(10, 8, 5)
    call = x, weight, bias, counts, ranks, torch.arange(3), 1, 2, False, True
    torch.library.opcheck(torch.ops.sparing.sampled_projection, call)
    q, k = torch.randn(2, 3, 10, 8), torch.randn(2, 3, 12, 8)
    keep, counted = torch.rand(2, 12) < 0.5, torch.rand(2, 10) < 0.5
    torch.library.opcheck(torch.ops.sparing.received, (q, k, keep, counted, 0.5))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_as_one_graph(dynamic):
    def both(x, weight, counts, ranks):
        _, lse = received(x.unsqueeze(1), x.unsqueeze(1), None, None, 0.1)
        return lse, torch.ops.sparing.sampled_projection(
            x, weight, None, counts, ranks, torch.arange(3), -7, 5, True, False
        )

    compiled = torch.compile(both, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for n in (20, 21):
        x, weight, _, counts, ranks = inputs(n, 8, 5)
        call = x, weight, counts, ranks
        assert all(torch.equal(a, b) for a, b in zip(compiled(*call), both(*call), strict=True))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"x": torch.randn(2, 10, 7)}, "weight"),
        ({"x": torch.randn(2, 10, 0)}, "x"),
        ({"weight": torch.randn(16, 8)}, "weight"),
        ({"weight": torch.randn(15, 8).double()}, "weight"),
        ({"bias": torch.randn(14)}, "bias"),
        ({"counts": torch.full((2, 3, 10), 9)}, "counts"),
        ({"counts": torch.full((2, 3, 10), -1)}, "counts"),
        ({"counts": torch.ones(2, 3, 10)}, "counts"),
        ({"ranks": torch.full((2, 3, 10), -1)}, "ranks"),
        ({"ranks": torch.ones(2, 3, 9, dtype=torch.long)}, "ranks"),
        ({"streams": torch.arange(2)}, "streams"),
    ],
)
def test_sizes_of_a_projection_are_checked_in_the_kernel(change, word):
    x, weight, bias, counts, ranks = inputs(10, 8, 5)
    call = {"x": x, "weight": weight, "bias": bias, "counts": counts, "ranks": ranks, "streams": torch.arange(3)}
    with pytest.raises(RuntimeError, match=word):
        torch.ops.sparing.sampled_projection(**{**call, **change}, seed=0, purpose=0, shared=False, stratified=False)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"k": torch.randn(2, 3, 12, 7)}, "k"),
        ({"keep": torch.ones(2, 10, dtype=torch.bool)}, "keep"),
        ({"counted": torch.ones(2, 12, dtype=torch.bool)}, "counted"),
    ],
)
def test_sizes_of_attention_are_checked_in_the_kernel(change, word):
    call = {"q": torch.randn(2, 3, 10, 8), "k": torch.randn(2, 3, 12, 8), "keep": None, "counted": None, "scale": 1.0}
    with pytest.raises(RuntimeError, match=word):
        torch.ops.sparing.received(**{**call, **change})
