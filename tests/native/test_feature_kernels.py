"""The kernels of features against plain formulas and specifications, for every instruction set of the machine."""

import pytest
import torch

import sparing
from sparing import native
from sparing.native.causal_features import feature_causal
from sparing.native.features import Map, feature_mix, feature_sums
from tests.support.kernel_checks import every_instruction_set, needs_kernels, no_worse, same_for_any_threads

pytestmark = needs_kernels

SHAPES = [(1, 1, 1, 1), (17, 20, 3, 50), (63, 80, 33, 5), (130, 128, 64, 49), (200, 64, 80, 100)]  # n, d, e, features


def inputs(n, d, e, *, batch=2, heads=2, size=1.0):
    gen = torch.Generator().manual_seed(n + d)
    return [torch.randn(batch, heads, n, w, generator=gen) * size for w in (d, d, e)]


def points_of(count, d, *, batch=2, heads=2):
    return torch.randn(batch, heads, count, d, generator=torch.Generator().manual_seed(count))


def keep_of(n, share=0.7):
    return torch.rand(2, n, generator=torch.Generator().manual_seed(n)) < share


def phi(x, points, kind, factor):
    """The features as the maps define them."""
    if kind == Map.GAUSSIAN:
        return (factor * (x.unsqueeze(-2) - points.unsqueeze(-3)).square().sum(-1)).exp()
    if kind == Map.EXPONENTIAL:
        y = factor * x
        return (y @ points.mT - y.square().sum(-1, keepdim=True) / 2).exp()
    return torch.nn.functional.elu(x) + 1


def moved(given, points, x):
    """The points: a leaf of their own where gradients reach them, else a constant."""
    return given[0] if given else None if points is None else points.to(x)


CASES = {Map.GAUSSIAN: -0.05, Map.EXPONENTIAL: 0.3, Map.ELU: 1.0, Map.PLAIN_ELU: 1.0}


def points_for(kind, features, d):
    return points_of(features, d) if kind in (Map.GAUSSIAN, Map.EXPONENTIAL) else None


@every_instruction_set
@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("n", "d", "e", "features"), SHAPES)
def test_sums_over_keys(isa, n, d, e, features, masked, kind):
    points, factor = points_for(kind, features, d), CASES[kind]
    keep = keep_of(n) if masked else None

    def kernel(x, values, *given):
        sums, mass, level = feature_sums(x, moved(given, points, x), values, keep, kind, factor)
        top = level.detach().exp()[..., None]
        return sums * top[..., None], mass * top

    def specification(x, values, *given):
        weights = phi(x, moved(given, points, x), kind, factor)
        weights = weights if keep is None else weights * keep[:, None, :, None]
        return weights.mT @ values, weights.sum(-2)

    with native.instruction_set(isa):
        learned = [points] if kind == Map.GAUSSIAN else []
        no_worse(kernel, specification, [*inputs(n, d, e)[1:], *learned], what=f"{isa}, {kind.name}")


@every_instruction_set
@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("divided", [False, True])
@pytest.mark.parametrize(("n", "d", "e", "features"), SHAPES)
def test_sums_over_features(isa, n, d, e, features, divided, kind):
    if not divided and kind in (Map.EXPONENTIAL, Map.ELU):
        pytest.skip("known up to a factor per token, which only cancels in a quotient")
    points, factor = points_for(kind, features, d), CASES[kind]
    gen = torch.Generator().manual_seed(n)
    count = d if points is None else features
    table = torch.randn(2, 2, count, e, generator=gen)
    mass = torch.rand(2, 2, count, generator=gen) + 0.1

    def kernel(x, table, mass, *given):
        return (
            feature_mix(x, moved(given, points, x), table, mass if divided else None, kind, factor)[0] + 0 * mass.sum()
        )

    def specification(x, table, mass, *given):
        weights = phi(x, moved(given, points, x), kind, factor)
        out = weights @ table
        return out / (weights @ mass.unsqueeze(-1)) if divided else out + 0 * mass.sum()

    with native.instruction_set(isa):
        learned = [points] if kind == Map.GAUSSIAN else []
        no_worse(kernel, specification, [inputs(n, d, e)[0], table, mass, *learned], what=f"{isa}, {kind.name}")


SPECS = [
    "skyformer(landmarks=9)",
    "skyformer(landmarks=20, gamma=0.0)",
    "skyformer(landmarks=12, kernel=softmax)",
    "random_features(features=50)",
    "kernel(kind=elu)",
    "kernel(kind=elu, normalize=length)",
]


@every_instruction_set
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("n_q", "n_k", "d", "e"), [(1, 1, 1, 1), (17, 40, 20, 3), (200, 63, 80, 33), (130, 130, 64, 64)]
)
def test_methods_are_no_worse_than_plain_float32(isa, n_q, n_k, d, e, masked, causal, spec):
    if causal and spec.startswith("skyformer"):
        pytest.skip("has no causal form")
    options = {
        "method": spec,
        "seed": 1,
        "is_causal": causal,
        "attn_mask": keep_of(n_k)[:, None, None] if masked else None,
    }
    tensors = [x[:, :, :n] for x, n in zip(inputs(200, d, e), (n_q, n_k, n_k), strict=True)]

    def by(impl):
        return lambda q, k, v: sparing.attention(q, k, v, impl=impl, **options)

    with native.instruction_set(isa):
        no_worse(by("native"), by("reference"), tensors, what=f"{isa}, {spec}")


@pytest.mark.parametrize("spec", ["random_features(features=32)", "kernel(kind=elu)"])
@pytest.mark.parametrize("size", [1e-3, 30.0, 1e4])
def test_no_size_of_the_inputs_overflows_or_vanishes(spec, size):
    q, k, v = inputs(150, 16, 8, size=size)

    def by(impl):
        return lambda q, k, v: sparing.attention(q, k, v, method=spec, seed=0, impl=impl)

    for shift in (0.0, -3 * size):  # all entries negative: 1 + ELU would vanish
        leaves = [x.requires_grad_() for x in (q + shift, k + shift, v.clone())]
        # Gradients beyond this size are rounding errors of the exponents, in the specification too.
        no_worse(by("native"), by("reference"), leaves, gradients=size < 1, what=f"{size}, {shift}")
        found = torch.autograd.grad(by("native")(*leaves).square().sum(), leaves)
        assert all(x.isfinite().all() for x in found)


@every_instruction_set
@pytest.mark.parametrize("spec", ["random_features(features=20)", "kernel(kind=elu)"])
def test_causal_rows_survive_keys_that_outgrow_all_earlier_ones(isa, spec):
    """The state is divided by ever larger factors, and the gradients come back through them."""
    q, k, v = inputs(200, 8, 4, size=0.3)
    growth = torch.linspace(-8.0, 8.0, 200)[:, None]
    k = k + growth if spec.startswith("kernel") else k * growth.exp().clamp_max(30.0)

    def by(impl):
        return lambda q, k, v: sparing.attention(q, k, v, method=spec, is_causal=True, seed=0, impl=impl)

    with native.instruction_set(isa):
        no_worse(by("native"), by("reference"), (q, k, v), what=f"{isa}, {spec}")


def test_rows_without_weight_average_the_values():
    q = torch.tensor([[0.0, -300.0]]).view(1, 1, 1, 2)
    k = torch.tensor([[-300.0, 0.0], [-300.0, 0.0]]).view(1, 1, 2, 2)
    v = torch.tensor([[1.0], [5.0]]).view(1, 1, 2, 1)
    assert sparing.attention(q, k, v, method="kernel(kind=elu)", impl="native").item() == 3.0


def test_reads_any_strides():
    q, k, v = inputs(50, 16, 16)
    points = points_of(20, 16)
    wanted = [
        *feature_sums(k, points, v, None, Map.GAUSSIAN, -0.1),
        *feature_mix(q, points, points, points[..., 0].abs(), Map.EXPONENTIAL, 0.2),
    ]
    for turn in (lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), lambda x: x.mT.contiguous().mT):
        q, k, v, points = map(turn, (q, k, v, points))
        found = [
            *feature_sums(k, points, v, None, Map.GAUSSIAN, -0.1),
            *feature_mix(q, points, points, points[..., 0].abs(), Map.EXPONENTIAL, 0.2),
        ]
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize(
    ("spec", "causal"),
    [
        ("skyformer(landmarks=9)", False),
        ("random_features(features=50)", False),
        ("random_features(features=50)", True),
        ("kernel(kind=elu)", False),
        ("kernel(kind=elu)", True),
    ],
)
def test_thread_counts_change_nothing(spec, causal):
    """Long enough for several chunks of keys."""

    def compute():
        leaves = [x.requires_grad_() for x in inputs(2500, 16, 8, heads=3)]
        out = sparing.attention(*leaves, method=spec, seed=2, is_causal=causal, impl="native")
        return out, *torch.autograd.grad(out.square().sum(), leaves)

    same_for_any_threads(compute)


def test_chunks_with_padding_give_the_same_sums():
    _, k, v = inputs(3000, 8, 4)
    keep = torch.zeros(2, 3000, dtype=torch.bool)
    keep[0, 2100:2300] = True  # whole chunks without a valid token; the other item has none at all
    sums, mass, level = feature_sums(k, points_of(7, 8), v, keep, Map.EXPONENTIAL, 0.5)
    alone = feature_sums(k[:1, :, 2100:2300], points_of(7, 8)[:1], v[:1, :, 2100:2300], None, Map.EXPONENTIAL, 0.5)
    for a, b in zip((sums, mass, level), alone, strict=True):
        torch.testing.assert_close(a[:1], b, atol=1e-5, rtol=1e-5)
        assert bool((a[1] == 0).all())


@pytest.mark.parametrize("needs_grad", [False, True])
def test_opcheck(needs_grad):
    q, k, v = (x.requires_grad_(needs_grad) for x in inputs(20, 8, 5))
    points = points_of(6, 8)
    torch.library.opcheck(torch.ops.sparing.feature_sums, (k, points, v, keep_of(20), 0, -0.1))
    torch.library.opcheck(torch.ops.sparing.feature_sums, (k, None, v, None, 2, 1.0))
    torch.library.opcheck(torch.ops.sparing.feature_mix, (q, points, points, None, 0, -0.1))
    torch.library.opcheck(torch.ops.sparing.feature_causal, (q, k, v, points, keep_of(20), 1, 0.3, 0.3, True))
    torch.library.opcheck(torch.ops.sparing.feature_causal, (q, k, v, None, None, 3, 1.0, 1.0, False))
    torch.library.opcheck(torch.ops.sparing.feature_mix, (q, points, points, points[..., 0].contiguous(), 1, 0.3))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_as_one_graph(dynamic):
    def attend(q, k, v, points):
        sums, mass, _ = feature_sums(k, points, v, None, Map.EXPONENTIAL, 0.3)
        late = feature_causal(q, k, v, points, None, Map.EXPONENTIAL, (0.3, 0.3))[0]
        return feature_mix(q, points, sums, mass, Map.EXPONENTIAL, 0.3)[0] + late

    compiled = torch.compile(attend, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for n in (40, 41):
        leaves = [x.requires_grad_() for x in inputs(n, 8, 5)]
        found, wanted = (f(*leaves, points_of(6, 8)) for f in (compiled, attend))
        assert torch.equal(found, wanted)
        for a, b in zip(*(torch.autograd.grad(x.square().sum(), leaves) for x in (found, wanted)), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("op", "change", "word"),
    [
        ("feature_sums", {"points": torch.randn(2, 2, 6, 7)}, "points"),
        ("feature_sums", {"points": torch.randn(1, 2, 6, 8)}, "points"),
        ("feature_sums", {"points": None}, "points"),
        ("feature_sums", {"map": 2}, "points"),
        ("feature_sums", {"map": 4}, "map"),
        ("feature_sums", {"map": -1}, "map"),
        ("feature_sums", {"values": torch.randn(2, 2, 19, 5)}, "values"),
        ("feature_sums", {"values": torch.randn(2, 2, 20, 5).double()}, "values"),
        ("feature_sums", {"keep": torch.ones(2, 19, dtype=torch.bool)}, "keep"),
        ("feature_sums", {"x": torch.randn(2, 2, 20, 8).long()}, "x"),
        ("feature_mix", {"table": torch.randn(2, 2, 7, 5)}, "table"),
        ("feature_mix", {"mass": torch.randn(2, 2, 7)}, "mass"),
        ("feature_mix", {"mass": torch.randn(2, 2, 6).double()}, "mass"),
        ("feature_causal", {"k": torch.randn(2, 2, 20, 7)}, "points"),
        ("feature_causal", {"k": torch.randn(2, 1, 20, 8), "points": None, "map": 2}, "k"),
        ("feature_causal", {"v": torch.randn(2, 2, 19, 5)}, "v"),
        ("feature_causal", {"keep": torch.ones(2, 19, dtype=torch.bool)}, "keep"),
        ("feature_causal", {"map": 0}, "map"),
    ],
)
def test_sizes_are_checked_in_the_kernel(op, change, word):
    call = {"x": torch.randn(2, 2, 20, 8), "points": points_of(6, 8), "map": 0, "factor": -0.1}
    if op == "feature_causal":
        q, k, v = inputs(20, 8, 5)
        factors = {"q_factor": 1.0, "k_factor": 1.0}
        call = {"q": q, "k": k, "v": v, "points": call["points"], "keep": None, "map": 1, **factors, "divide": True}
    elif op == "feature_sums":
        call |= {"values": torch.randn(2, 2, 20, 5), "keep": None}
    else:
        call |= {"table": torch.randn(2, 2, 6, 5), "mass": None}
    with pytest.raises(RuntimeError, match=word):
        getattr(torch.ops.sparing, op)(**{**call, **change})
