"""The kernels of `key_clusters` against the specification, for every instruction set of the machine."""

from functools import partial

import pytest
import torch

import sparing
from sparing import native
from sparing.call import Call
from sparing.draws import Draws
from sparing.mask import Mask
from sparing.methods.key_clusters import clusters, poles
from sparing.methods.key_clusters import native as kernels
from sparing.methods.key_clusters.method import KeyClusters, native_cluster
from tests.support.kernel_checks import Yardstick, every_instruction_set, needs_kernels, no_worse, same_for_any_threads

pytestmark = needs_kernels


def inputs(n_q, n_k, d, e, batch=2, heads=2):
    """Keys of a few topics, and queries that look for some of them."""
    gen = torch.Generator().manual_seed(n_q + d)
    topics = 2 * torch.randn(7, d, generator=gen)
    of = torch.randint(0, 7, (max(n_q, n_k),), generator=gen)
    q, k = (topics[of[:n]] + 0.7 * torch.randn(batch, heads, n, d, generator=gen) for n in (n_q, n_k))
    return [q, k, torch.randn(batch, heads, n_k, e, generator=gen)]


def keep_of(n):
    keep = torch.rand(2, n, generator=torch.Generator().manual_seed(n)) < 0.8
    keep[0, : n // 3] = False
    return keep


def by(impl, **options):
    def compute(q, k, v):
        found = sparing.inspect(q, k, v, impl=impl, seed=1, **options)
        return found.output, found.lse, found.statistics["error"], found.statistics["touched"].to(q.dtype)

    return compute


SPECS = [
    "key_clusters(clusters=6, keys=8, window=4, chunk=16)",
    "key_clusters(clusters=0.25, keys=25, window=0, sinks=0, order=1, select=mass, chunk=64)",
    "key_clusters(clusters=70, keys=60, window=16, sinks=3, chunk=128)",
    "key_clusters(clusters=20, keys=0, chunk=128, steps=0)",
    "key_clusters(keys=1000)",
    "key_clusters(clusters=9, keys=40, tolerance=0.02, cap=8.0, chunk=32)",
    "key_clusters(clusters=20, keys=1000, window=0, sinks=0, select=mass, tolerance=0.01, chunk=64)",
]
NAMES = ("output", "lse", "error", "touched")  # what `by` gives
SHAPES = [(1, 1, 1, 1), (17, 17, 20, 3), (63, 130, 80, 33), (130, 63, 16, 64), (300, 300, 64, 17)]


def by_each_kernel(*tensors, **options):
    """(instruction set, results) for those of this machine: the specification that they are held to is computed once."""
    for isa in native.info().available:
        with native.instruction_set(isa):
            found = by("native", **options)(*tensors)
        yield isa, found


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize(("n_q", "n_k", "d", "e"), SHAPES)
def test_the_same_numbers_in_float64(n_q, n_k, d, e, spec, masked, causal):
    """In float64 no rounding decides which cluster is expanded: every row must agree."""
    options = {"method": spec, "attn_mask": keep_of(n_k)[:, None, None] if masked else None, "is_causal": causal}
    tensors = [x.double() for x in inputs(n_q, n_k, d, e)]
    wanted = by("reference", **options)(*tensors)
    for isa, found in by_each_kernel(*tensors, **options):
        for name, a, b in zip(NAMES, found, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9, msg=partial("{}, {}: {}".format, isa, name))


@pytest.mark.parametrize("size", [1e5, 1e8])
@pytest.mark.parametrize("spec", [SPECS[0], SPECS[3], SPECS[5]])
def test_a_query_that_outdoes_all_others_by_far(spec, size):
    """It moves the mean query, so that scores of clusters are far above all keys in them, and are then expanded."""
    q, k, v = (x.double() for x in inputs(300, 300, 8, 8))
    q[0, 0, 10] *= size
    wanted = by("reference", method=spec, is_causal=True)(q, k, v)
    for isa, found in by_each_kernel(q, k, v, method=spec, is_causal=True):
        for name, a, b in zip(NAMES, found, wanted, strict=True):
            assert name == "error" or bool(b.isfinite().all()), name
            allowed = 1e-8 if name in ("output", "touched") else 1e-6  # logits of 1e8 are rounded by 1e-8
            told = partial("{}, {}: {}".format, isa, name)
            torch.testing.assert_close(a, b, rtol=allowed, atol=allowed, msg=told)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("spec", SPECS[:3])
def test_keys_that_outdo_their_summary_by_far(spec, causal):
    """Logits in the thousands: no sum that began with the summaries could hold exp of the difference."""
    q, k, v = (x.double() for x in inputs(200, 200, 16, 8))
    tensors = (30 * q, 30 * k, v)
    wanted = by("reference", method=spec, is_causal=causal)(*tensors)
    for isa, found in by_each_kernel(*tensors, method=spec, is_causal=causal):
        for name, a, b in zip(NAMES, found, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9, msg=partial("{}, {}: {}".format, isa, name))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("spec", SPECS)
def test_no_worse_than_plain_float32(spec, causal):
    options = {"method": spec, "is_causal": causal}
    specified = Yardstick(by("reference", **options), inputs(200, 200, 32, 24), gradients=False)
    for isa in native.info().available:
        with native.instruction_set(isa):
            specified.hold(by("native", **options), isa)


@every_instruction_set
@pytest.mark.parametrize(("rows", "d", "centres"), [(1, 1, 1), (65, 20, 7), (200, 64, 60), (500, 33, 130)])
def test_the_same_clusters(isa, rows, d, centres):
    gen = torch.Generator().manual_seed(rows)
    k = torch.randn(2, 3, 2 * rows + 1, d, generator=gen) * torch.rand(d, generator=gen) ** 3
    factor = torch.randn(2, 3, 2, d, d, generator=gen).double().tril()
    valid = torch.rand(2, 2, rows, generator=gen) < 0.8
    draws = Draws(5, torch.arange(3))
    start, lesson = (clusters.spread_out(valid, torch.full((2, 2), m), draws, "x") for m in (centres, 4 * centres))
    wanted = clusters.cluster(k, factor, valid, start, lesson, 4)
    with native.instruction_set(isa):
        assert torch.equal(native_cluster(k, factor, valid, start, lesson, 4), wanted)


def plan_of(q, k, causal):
    call = Call(scale=0.25, mask=Mask(causal=causal), draws=Draws(1, torch.arange(q.shape[1])))
    return KeyClusters(clusters=12, keys=20, window=6, chunk=32).plan(q, k, call)


@every_instruction_set
@pytest.mark.parametrize("causal", [False, True])
def test_the_same_summaries(isa, causal):
    q, k, v = inputs(150, 150, 24, 10)

    def by_kernel(level, k, v):
        known = (level.known.mean.to(k), level.known.covariance.to(k))
        keys, sums, offset, weight, spread, scatter, shares = kernels.summaries(
            k, v, level.labels, *known, level.clusters, 0.25, poles.FAINTEST, poles.NOTHING
        )
        return keys, sums, offset, weight, spread, scatter, shares

    def by_formula(level, k, v):
        pole = poles.summarise(k, v, level, 0.25)
        inside = (level.labels >= 0).to(k)
        sums = pole.values * pole.weight.unsqueeze(-1)
        return pole.keys, sums, pole.offset, pole.weight, pole.spread, pole.scatter, pole.shares.exp() * inside

    for level in plan_of(q, k, causal).levels:
        with native.instruction_set(isa):
            no_worse(partial(by_kernel, level), partial(by_formula, level), [k, v], gradients=False)


@pytest.mark.parametrize("causal", [False, True])
def test_thread_counts_change_nothing(causal):
    q, k, v = inputs(700, 700, 32, 32, heads=3)
    spec = "key_clusters(clusters=40, keys=64, chunk=128)"
    same_for_any_threads(lambda: by("native", method=spec, is_causal=causal)(q, k, v))


@pytest.mark.parametrize("causal", [False, True])
def test_more_queries_than_one_task_takes(causal):
    """Expansions are kept for some thousand queries at a time."""
    q, k, v = (x.double() for x in inputs(4500, 4500, 4, 4, batch=1, heads=1))
    options = {"method": "key_clusters(clusters=12, keys=600, window=2)", "is_causal": causal}
    for a, b in zip(by("native", **options)(q, k, v), by("reference", **options)(q, k, v), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def whole_call(causal=False, n=40):
    q, k, v = inputs(n, n, 8, 5)
    plan = plan_of(q, k, causal)
    level = plan.levels[0]
    parts = kernels.summaries(
        k, v, level.labels, level.known.mean.to(k), level.known.covariance.to(k), level.clusters, 0.25, -8.0, 1e-9
    )
    names = ("pole_keys", "pole_values", "offset", "weight", "spread", "scatter")
    return {
        "q": q, "k": k, "v": v, "seen": plan.seen.contiguous(), "own": plan.own.contiguous(),
        "mean": level.known.mean.to(k), "variance": level.known.variance.to(k), **dict(zip(names, parts[:6])),
        "labels": level.labels[None], "shares": parts[6][None],
        "levels": torch.tensor([[level.size, level.clusters, level.chunks]]), "before": 3, "after": 3, "sinks": 1,
        "block": plan.block or 0, "keys": 9, "second": True, "by_mass": False, "cap": 2.0, "tolerance": 0.0, "scale": 0.25,
    }  # fmt: skip


def test_opcheck():
    q, k, v = inputs(20, 31, 8, 5)
    level = plan_of(q, k, False).levels[0]
    known = (level.known.mean.to(k), level.known.covariance.to(k))
    torch.library.opcheck(torch.ops.sparing.summaries, (k, v, level.labels, *known, level.clusters, 0.25, -8.0, 1e-9))
    torch.library.opcheck(torch.ops.sparing.key_clusters, tuple(whole_call().values()))
    rows, valid = torch.randn(2, 9, 4), torch.ones(2, 9, dtype=torch.bool)
    factor, some_valid = torch.eye(8).double().expand(2, 2, 3, 8, 8).contiguous(), torch.ones(2, 3, 9) > 0
    torch.library.opcheck(torch.ops.sparing.metric_rows, (k, factor, some_valid, 100))
    some, used = torch.zeros(2, 3, dtype=torch.long), torch.ones(2, 3, dtype=torch.bool)
    torch.library.opcheck(torch.ops.sparing.kmeans, (rows.round(), valid, some, used, some, used, 2))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"k": torch.randn(2, 2, 40, 7)}, "k"),
        ({"v": torch.randn(2, 2, 39, 5)}, "v"),
        ({"seen": torch.full((2, 40), 41)}, "seen"),
        ({"own": torch.full((2, 40), 40)}, "own"),
        ({"own": 2 * torch.arange(20).repeat(2, 2)}, "own"),
        ({"labels": torch.full((1, 2, 2, 40), 99)}, "labels"),
        ({"shares": torch.randn(1, 2, 2, 39)}, "shares"),
        ({"levels": torch.tensor([[40, 13, 1]])}, "summary"),
        ({"levels": torch.tensor([[0, 12, 1]])}, "levels"),
        ({"levels": torch.zeros(0, 3, dtype=torch.long)}, "level"),
        ({"weight": torch.randn(2, 2, 11)}, "weight"),
        ({"mean": torch.randn(2, 2, 2, 8)}, r"mean|variance"),
        ({"keys": -1}, "keys"),
        ({"before": -2}, "before"),
        ({"tolerance": -1.0}, "tolerance"),
        ({"block": 8}, "block"),
        ({"variance": torch.randn(2, 2, 1).double()}, "variance"),
    ],
)
def test_sizes_are_checked_in_the_kernel(change, word):
    with pytest.raises(RuntimeError, match=word):
        torch.ops.sparing.key_clusters(**{**whole_call(), **change})


def test_fewer_chunks_than_the_queries_need_are_an_error():
    call = whole_call(causal=True)
    short = {
        name: call[name][:, :, :6] for name in ("pole_keys", "pole_values", "offset", "weight", "spread", "scatter")
    }
    call |= {name: x.contiguous() for name, x in short.items()} | {"labels": call["labels"].clamp_max(5)}
    call |= {"mean": call["mean"][:, :, :2].contiguous(), "variance": call["variance"][:, :, :2].contiguous()}
    with pytest.raises(RuntimeError, match="fewer chunks"):
        torch.ops.sparing.key_clusters(**{**call, "levels": torch.tensor([[8, 3, 2]])})


@pytest.mark.parametrize("name", ["start", "lesson"])
def test_rows_that_do_not_exist_are_an_error(name):
    rows = {"start": torch.zeros(1, 2, dtype=torch.long), "lesson": torch.zeros(1, 2, dtype=torch.long)}
    used = torch.ones(1, 2, dtype=torch.bool)
    rows[name] = torch.tensor([[0, 5]])
    call = (torch.zeros(1, 5, 3), torch.ones(1, 5, dtype=torch.bool), rows["start"], used, rows["lesson"], used, 1)
    with pytest.raises(RuntimeError, match=name):
        torch.ops.sparing.kmeans(*call)
