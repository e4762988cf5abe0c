"""K-means on whole numbers: the same clusters whoever computes them, on hard metrics, padding and any batch."""

from fractions import Fraction

import pytest
import torch
from torch import Tensor

from sparing.draws import Draws
from sparing.methods.key_clusters.clusters import Rows, Sums, factor, kmeans, spread_out, sums, whole_numbers

EXACT = 2**24  # float32 holds every whole number up to here


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def some(*rows: int, of: int) -> Rows:
    """(1, of) slots, of which the first are used."""
    return Rows(torch.tensor([[*rows, *[0] * (of - len(rows))]]), (torch.arange(of) < len(rows)).unsqueeze(0))


def problem(units: int = 3, n: int = 40, d: int = 5, seed: int = 0) -> tuple[Tensor, Tensor, Rows, Rows]:
    """Coarse whole numbers, so that ties and means that end in a half are common; the last unit is padded."""
    gen = torch.Generator().manual_seed(seed)
    x = torch.randint(-3, 4, (units, n, d), generator=gen).float()
    valid = torch.ones(units, n, dtype=torch.bool)
    valid[-1, n // 2 :] = False
    x[-1, n // 2 :] = 0.0
    start = torch.stack([torch.randperm(n // 2, generator=gen)[:6] for _ in range(units)])
    lesson = torch.stack([torch.randperm(n // 2, generator=gen)[:15] for _ in range(units)])
    used = torch.arange(6).expand(units, 6) < torch.tensor([[6], [4], [5]])[:units]
    return x, valid, Rows(start, used), Rows(lesson, torch.arange(15).expand(units, 15) < 13)


def by_whole_numbers(x: Tensor, valid: Tensor, start: Rows, lesson: Rows, steps: int) -> list[list[int]]:
    """The same with Python's integers and fractions."""
    found = []
    for unit in range(len(x)):
        rows = [[int(entry) for entry in row] for row in x[unit].tolist()]
        centres = [rows[i] for i, used in zip(start.place[unit].tolist(), start.counts[unit].tolist()) if used]
        learn = [rows[i] for i, used in zip(lesson.place[unit].tolist(), lesson.counts[unit].tolist()) if used]

        def nearest(row: list[int], centres: list[list[int]]) -> int:
            far = [sum((a - b) ** 2 for a, b in zip(row, centre)) for centre in centres]
            return far.index(min(far))

        for _ in range(steps):
            joined = [nearest(row, centres) for row in learn]
            for c in range(len(centres)):
                mine = [row for row, where in zip(learn, joined) if where == c]
                if mine:
                    centres[c] = [round(Fraction(sum(column), len(mine))) for column in zip(*mine)]
        found.append([nearest(row, centres) if ok else -1 for row, ok in zip(rows, valid[unit].tolist())])
    return found


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_kmeans_is_that_of_whole_numbers(steps):
    for seed in range(5):
        asked = problem(seed=seed)
        assert kmeans(*asked, steps).tolist() == by_whole_numbers(*asked, steps)
    large = (whole_numbers(normal(2, 60, 16), torch.ones(2, 60) > 0), torch.ones(2, 60) > 0)
    rows = [Rows(torch.arange(0, 60, step).expand(2, -1), torch.ones(2, 60 // step) > 0) for step in (10, 2)]
    assert kmeans(*large, *rows, steps).tolist() == by_whole_numbers(*large, *rows, steps)


def test_kmeans_is_the_same_in_any_order_of_summation():
    n, d = 300, 64
    valid = torch.ones(1, n, dtype=torch.bool)
    real = normal(1, n, d) * normal(d, seed=1).exp()
    start, lesson = (Rows(torch.arange(0, n, step)[None], torch.ones(1, n // step) > 0) for step in (10, 2))
    order = torch.randperm(d, generator=torch.Generator().manual_seed(2))

    def labels(x: Tensor) -> list[Tensor]:
        return [kmeans(y, valid, start, lesson, 4) for y in (x, x[..., order], x.flip(-1), x.double())]

    first, *others = labels(whole_numbers(real, valid))
    assert all(torch.equal(first, other) for other in others)
    assert first.unique().numel() == 30
    # Control: integers beyond what float32 sums exactly, with two centres that differ by one.
    x = whole_numbers(real, valid) * 2**8 + 1.0
    x[:, 10] = x[:, 0] + 1.0
    first, *others = labels(x)
    assert not all(torch.equal(first, other) for other in others)


def test_kmeans_knows_nothing_of_batch_mates():
    asked = problem()
    together = kmeans(*asked, 3)
    x, valid, start, lesson = asked
    for u in range(3):
        one = slice(u, u + 1)
        rows = (Rows(*(t[one] for t in rows)) for rows in (start, lesson))
        assert torch.equal(kmeans(x[one], valid[one], *rows, 3), together[one])


def test_a_centre_without_rows_stays_and_ties_go_to_the_first():
    x = torch.tensor([[[0.0], [1.0], [2.0], [3.0], [50.0], [51.0]]])
    valid = torch.ones(1, 6, dtype=torch.bool)
    start = some(0, 2, 4, of=5)  # two slots are not used
    assert kmeans(x, valid, start, some(0, of=1), 0).tolist() == [[0, 0, 1, 1, 2, 2]]  # 1 lies in the middle
    assert kmeans(x, valid, start, some(0, 1, 2, of=4), 3).tolist() == [[0, 0, 1, 1, 2, 2]]
    # Taught by nothing, the centres stay where they started; the unused slots of the lesson move none to row 0.
    assert kmeans(x, valid, some(1, 3, of=2), some(3, of=9), 4).tolist() == [[0, 0, 0, 1, 1, 1]]


def test_whole_numbers_stay_where_float32_is_exact():
    for d in range(1, 513):
        x = normal(2, d)
        rows = torch.stack([x, torch.ones_like(x), 1e30 * x, 1e-30 * x])
        found = whole_numbers(rows, torch.ones(4, 2, dtype=torch.bool)).double()
        assert torch.equal(found, found.round())
        largest = found.abs().amax((-2, -1))
        assert bool((largest == largest[0]).all()), "the largest entry fills the range, whatever the unit"
        # Twice a score, 2 x.c - c.c, and each of its partial sums is a whole number of at most this size.
        assert 3 * d * int(largest[0]) ** 2 <= EXACT
        assert 6 * d * int(largest[0] + 1) ** 2 > EXACT, "and not half of the range is wasted"


def test_whole_numbers_ignore_padding_and_survive_zeros():
    x = normal(2, 9, 4)
    valid = torch.arange(9).expand(2, 9) < 6
    spoiled = x.masked_fill(~valid.unsqueeze(-1), 1e20)
    assert torch.equal(whole_numbers(spoiled, valid), whole_numbers(x, valid))
    assert bool((whole_numbers(spoiled, valid)[:, 6:] == 0).all())
    assert not whole_numbers(torch.zeros_like(x), valid).any()
    assert not whole_numbers(x, torch.zeros_like(valid)).any()


@pytest.mark.parametrize("size", [1e-12, 1.0, 1e12, 1e60])
def test_factor_is_a_root_of_any_metric(size):
    q = normal(3, 50, 6) * size**0.5
    full = q.mT @ q / 50
    L = factor(full)
    ridge = 1e-3 * full.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None] * torch.eye(6, dtype=torch.float64)
    torch.testing.assert_close(L @ L.mT, full + ridge, rtol=1e-9, atol=1e-12 * size)
    one = q[:, 0, :, None] * q[:, 0, None, :]
    assert factor(one).isfinite().all()
    assert bool((factor(one).diagonal(dim1=-2, dim2=-1) > 0).all()), (
        "a direction that no query asks for counts a little"
    )


def test_factor_of_nothing_is_the_identity_and_spoils_no_neighbour():
    second = torch.stack([torch.zeros(4, 4, dtype=torch.float64), torch.eye(4, dtype=torch.float64)])
    found = factor(second)
    assert torch.equal(found[0], second[1])
    torch.testing.assert_close(found[1], factor(second[1:])[0], rtol=0, atol=0)


def test_moments_are_those_of_the_rows_that_count_up_to_each_end():
    q, counts = normal(2, 3, 24, 4), torch.rand(2, 24, generator=torch.Generator().manual_seed(1)) < 0.6
    counts[1, :8] = False  # a first chunk of nothing
    found = sums(q.masked_fill(~counts[:, None, :, None], torch.nan), counts, 8).moments
    for b, t in ((0, 0), (0, 2), (1, 1), (1, 2)):
        rows = q[b, :, : 8 * (t + 1)][:, counts[b, : 8 * (t + 1)]]
        torch.testing.assert_close(found.mean[b, :, t], rows.mean(1))
        torch.testing.assert_close(found.second[b, :, t], rows.mT @ rows / rows.shape[1])
        torch.testing.assert_close(
            found.variance[b, :, t], (rows - rows.mean(1, keepdim=True)).square().sum(-1).mean(1)
        )
    assert not found.mean[1, :, 0].any()
    assert torch.equal(found.at(torch.tensor([2, 0])).mean, found.mean[:, :, [2, 0]])


def test_what_is_remembered_of_earlier_rows():
    q, counts = normal(1, 2, 24, 4), torch.ones(1, 24, dtype=torch.bool)
    found = sums(q, counts, 8, 0.5)
    weight = torch.tensor([0.25, 0.5, 1.0], dtype=torch.float64).repeat_interleave(8)
    assert float(found.total[0, 0, 2, 0]) == float(weight.sum())
    mean, second = (weight @ q[0]) / weight.sum(), q[0].mT * weight @ q[0] / weight.sum()
    torch.testing.assert_close(found.moments.mean[0, :, 2], mean)
    torch.testing.assert_close(found.moments.second[0, :, 2], second)
    start = Sums(*(x[:, :, :1] for x in found))
    onward = sums(q[:, :, 8:], counts[:, 8:], 8, 0.5, start)
    for a, b in zip(onward, found, strict=True):
        assert torch.equal(a, b[:, :, 1:]), "going on from sums is the same as starting with all rows"


def check_stretches(rows: Rows, valid: Tensor, wanted: Tensor) -> None:
    """Every head of rows (B, H, T, m) takes valid rows only, the i-th of them from the i-th of equal stretches."""
    for b, t in torch.cartesian_prod(torch.arange(valid.shape[0]), torch.arange(valid.shape[1])).tolist():
        places = valid[b, t].nonzero().flatten().tolist()
        m, total = min(int(wanted[b, t]), len(places)), len(places)
        for place, counts in zip(rows.place[b, :, t].tolist(), rows.counts[b, :, t].tolist()):
            assert counts == [i < m for i in range(len(counts))]
            assert set(place[:m]) <= set(places)
            ranks = [places.index(p) for p in place[:m]]
            assert all(i * total < (rank + 1) * m and rank * m < (i + 1) * total for i, rank in enumerate(ranks))
            assert len(set(ranks)) == m, "a row that is taken twice is a lost centre"


def test_spread_out_takes_one_valid_row_of_each_stretch():
    valid = torch.rand(4, 3, 48, generator=torch.Generator().manual_seed(0)) < 0.7
    valid[0] = True
    valid[1, 1] = False  # a chunk of nothing
    valid[2, 2] = torch.arange(48) < 5
    draws = Draws(0, torch.arange(20))
    for wanted in (torch.full((4, 3), 12), torch.full((4, 3), 200), torch.tensor([[1, 2, 3]] * 4)):
        rows = spread_out(valid, wanted, draws, "test")
        assert rows.place.shape == (4, 20, 3, max(1, min(int(wanted.max()), 48)))
        check_stretches(rows, valid, wanted)
    with pytest.raises(AssertionError):  # control: rows of a sequence without padding
        check_stretches(spread_out(torch.ones_like(valid), wanted, draws, "test"), valid, wanted)
    taken = spread_out(valid, torch.full((4, 3), 12), draws, "test").place[0]
    assert taken.unique(dim=0).shape[0] == 20, "heads draw for themselves"
    assert taken[:, 0].unique(dim=0).shape[0] > 1
    every = spread_out(valid, torch.full((4, 3), 48), draws, "test")
    assert every.place[2, :, 2, :5].tolist() == [list(range(5))] * 20, "all rows where there are not more"


def test_spread_out_depends_on_ranks_alone():
    """Not on padding, on batch-mates, nor on how many rows another item asks for."""
    draws = Draws(3, torch.arange(4))
    alone = spread_out(torch.ones(1, 2, 21, dtype=torch.bool), torch.full((1, 2), 5), draws, "test")
    for shift in (0, 9):
        valid = torch.zeros(2, 2, 30, dtype=torch.bool)
        valid[0, :, shift : shift + 21] = True
        valid[1] = True
        both = spread_out(valid, torch.tensor([[5, 5], [17, 30]]), draws, "test")
        assert torch.equal(both.place[:1, ..., :5] - shift, alone.place)
        assert both.counts[0].sum(-1).tolist() == [[5, 5]] * 4
    other = spread_out(torch.ones(1, 2, 21, dtype=torch.bool), torch.full((1, 2), 5), Draws(4, draws.streams), "test")
    assert not torch.equal(other.place, alone.place)
