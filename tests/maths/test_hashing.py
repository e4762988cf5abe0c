"""Hash families: their construction, and the law of their collisions."""

import math

import pytest
import torch
from torch import Tensor

from sparing.draws import Draws
from sparing.maths import hashing
from sparing.maths.hashing import hadamard_rotations, hyperplanes, sign_codes


def streams(count: int, seed: int = 0) -> Draws:
    """As many independent draws as asked for, one per head."""
    return Draws(seed, torch.arange(count))


def dense_pairs(x: float, width: int, count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Unit vectors (count, width) with scalar product x, in random directions."""
    gen = torch.Generator().manual_seed(seed)
    a, b = torch.randn(2, count, width, generator=gen, dtype=torch.float64).unbind(0)
    a = a / a.norm(dim=-1, keepdim=True)
    b = b - (a * b).sum(-1, keepdim=True) * a
    return a, x * a + math.sqrt(1 - x * x) * b / b.norm(dim=-1, keepdim=True)


def sparse_pairs(x: float, width: int, count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """The same with one and two entries that are not zero, at random places."""
    eye = torch.eye(width, dtype=torch.float64)
    first, step = torch.randint(width - 1, (2, count), generator=torch.Generator().manual_seed(seed))
    a, b = eye[first], eye[(first + step + 1) % width]
    return a, x * a + math.sqrt(1 - x * x) * b


def collisions(normals: Tensor, pairs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Per draw, the share of equal codes and of equal bits, over one or several pairs per draw."""
    draws, width = normals.shape[0], normals.shape[-1]
    a, b = (sign_codes(y.reshape(1, draws, -1, width), normals)[0].flatten(1) for y in pairs)  # (draws, pairs x codes)
    bits = normals.shape[1]
    wrong = sum(((a ^ b) >> bit) & 1 for bit in range(bits))
    assert isinstance(wrong, Tensor)
    return (a == b).double().mean(-1), 1 - wrong.double().mean(-1) / bits


def z_score(shares: Tensor, expected: float) -> float:
    """The sampling unit is a draw: codes inside a draw depend on each other."""
    return float((shares.mean() - expected) / (shares.std() / math.sqrt(len(shares))).clamp_min(1e-12))


def one_by_one(family: str, bits: int, width: int, draws: Draws, hashes: int = 64) -> Tensor:
    return torch.cat(list(hyperplanes(family, draws, "t", bits=bits, hashes=hashes, width=width)), dim=2)  # type: ignore[arg-type]


def hadamard_matrix(size: int) -> Tensor:
    """Entry (i, j) is -1 where i and j share an odd number of bits."""
    index = torch.arange(size)
    shared = (index[:, None] & index)[..., None] >> torch.arange(size.bit_length()) & 1
    return 1 - 2 * (shared.sum(-1) % 2).double()


def interleaved(rotations: Tensor) -> Tensor:
    """Bit b of code h is coordinate h of rotation b: the layout of the library."""
    return rotations


def contiguous(rotations: Tensor) -> Tensor:
    """A code takes its bits from consecutive coordinates of one rotation: the layout of the public code."""
    draws, bits, size, _ = rotations.shape
    return rotations.reshape(draws, size, bits, size).transpose(1, 2)


@pytest.mark.parametrize("size", [2, 16, 64])
def test_rotations_are_the_product_of_three_signed_hadamard_matrices(size):
    draws = streams(2)
    found = hadamard_rotations(draws, "t", 3, size)
    matrix = hadamard_matrix(size)
    d1, d2, d3 = (torch.diag_embed(s) for s in draws.signs("t", 3, 3, size).unbind(2))
    assert torch.equal(found, matrix @ d3 @ matrix @ d2 @ matrix @ d1)
    assert torch.equal(found @ found.mT, (size**3 * torch.eye(size).double()).expand_as(found))


@pytest.mark.parametrize("family", ["hadamard", "gaussian"])
@pytest.mark.parametrize("width", [1, 8, 16, 20, 64, 80, 128])
@pytest.mark.parametrize("hashes", [1, 7, 33, 130])
def test_shapes_of_any_width_and_number_of_hashes(family, width, hashes):
    parts = list(hyperplanes(family, streams(2), "t", bits=3, hashes=hashes, width=width))
    assert sum(p.shape[2] for p in parts) == hashes
    assert all(p.shape[:2] == (2, 3) and p.shape[3] == width and 0 < p.shape[2] <= 32 for p in parts)
    rows = torch.cat(parts, dim=2).flatten(1, 2)
    assert len(rows[0].unique(dim=0)) == (3 * hashes if width > 1 or family == "gaussian" else len(rows[0].unique()))


@pytest.mark.parametrize("family", ["hadamard", "gaussian"])
def test_the_first_bits_do_not_depend_on_how_many_there_are(family):
    few, many = (one_by_one(family, bits, 32, streams(2), hashes=70) for bits in (5, 16))
    assert torch.equal(few, many[:, :5])
    x = torch.randn(2, 2, 40, 32, generator=torch.Generator().manual_seed(0))
    codes = sign_codes(x, many, torch.tensor([5, 16]))
    assert torch.equal(codes[0], sign_codes(x, few)[0])
    assert torch.equal(codes[1], sign_codes(x, many)[1])
    assert codes.dtype == torch.int64
    assert codes[1].max() > 2**15


def test_bits_are_the_sides_of_the_hyperplanes():
    gen = torch.Generator().manual_seed(0)
    x, normals = torch.randn(2, 3, 9, 20, generator=gen), one_by_one("hadamard", 6, 20, streams(3), hashes=5)
    codes = sign_codes(x, normals)
    for b, h, i, m in ((0, 0, 0, 0), (1, 2, 8, 4), (0, 1, 5, 2)):
        bits = [int(x[b, h, i].double() @ normals[h, bit, m] > 0) for bit in range(6)]
        assert codes[b, h, i, m] == sum(bit << place for place, bit in enumerate(bits))
    assert torch.equal(sign_codes(x * 1e-3, normals), codes), "only the direction counts"
    assert torch.equal(sign_codes(-x, normals), 63 - codes)
    assert bool((sign_codes(x * 0, normals) == 0).all()), "a vector without a direction has code 0"


def test_ties_do_not_depend_on_the_company():
    """Sign vectors lie exactly on many hyperplanes; a library may order their sums by the size of the whole tensor."""
    gen = torch.Generator().manual_seed(0)
    x = torch.randn(1, 1, 200, 48, generator=gen, dtype=torch.float64).sign() / math.sqrt(48)
    normals = one_by_one("hadamard", 16, 48, streams(1))
    codes = sign_codes(x, normals)
    projections = (x @ normals.flatten(1, 2).mT).abs()
    assert int(((projections > 0) & (projections < 1e-9)).sum()) > 100, "the test needs ties that rounding would break"
    for i in range(0, 200, 23):
        assert torch.equal(sign_codes(x[:, :, i : i + 1], normals), codes[:, :, i : i + 1])


def assert_law(family, bits, width, *, batches, cosines=(-0.5, 0.0, 0.5, 0.9, 0.99)):
    """H0: the collision rate of codes is p^bits and that of bits is p, p = 1 - arccos(x) / pi. Statistic: z of the mean
    over independent draws of the library's hash, 250 per batch, each of which sees 16 pairs; |z| < 5.5."""
    found = []  # (draws, codes or bits, cosines)
    for seed in range(batches):
        normals = one_by_one(family, bits, width, streams(250, seed))
        a, _ = dense_pairs(1.0, width, 250, seed)
        assert bool((collisions(normals, (a, a))[0] == 1).all()), "a vector always collides with itself"
        rates = [torch.stack(collisions(normals, dense_pairs(x, width, 250 * 16, seed)), -1) for x in cosines]
        found.append(torch.stack(rates, -1))
    for x, rates in zip(cosines, torch.cat(found).unbind(-1), strict=True):
        p = 1 - math.acos(x) / math.pi
        for what, shares, wanted in zip(("bits", "codes"), rates.flip(-1).unbind(-1), (p, p**bits), strict=True):
            z = z_score(shares, wanted)
            assert abs(z) < 5.5, f"{what} at x={x}: {float(shares.mean())} against {wanted}, z = {z:.1f}"


# 50 two-sided assertions at |z| < 5.5: false-alarm rate 50 * 3.8e-8 = 1.9e-6 over fresh seeds.
@pytest.mark.statistical
@pytest.mark.parametrize(
    ("family", "bits", "width", "batches"),
    [
        ("hadamard", 8, 32, 4),
        ("hadamard", 8, 64, 2),
        ("hadamard", 8, 20, 2),
        ("gaussian", 8, 8, 2),
        pytest.param("hadamard", 9, 64, 24, marks=pytest.mark.slow),
    ],
)
def test_collisions_follow_the_angular_law(family, bits, width, batches):
    assert_law(family, bits, width, batches=batches)


# The control: bits of one rotation are negatively dependent, codes made of them collide 15 % too rarely at x = 0, which
# is 12 standard deviations of these 1000 draws.
@pytest.mark.statistical
def test_the_law_fails_when_the_library_takes_the_bits_of_a_code_from_one_rotation(monkeypatch):
    monkeypatch.setattr(hashing, "hadamard_rotations", lambda *args: contiguous(hadamard_rotations(*args)))
    with pytest.raises(AssertionError, match=r"codes at x=0\.0"):
        assert_law("hadamard", 8, 32, batches=4, cosines=(0.0, 0.5))


def test_narrow_vectors_get_gaussian_hyperplanes():
    """A rotation of 8 coordinates of a vector would have few values; from width 16 on the families differ."""
    for width, equal in ((1, True), (8, True), (15, True), (16, False)):
        both = [one_by_one(family, 5, width, streams(2), hashes=40) for family in ("hadamard", "gaussian")]
        x = torch.randn(1, 2, 30, width, generator=torch.Generator().manual_seed(0))
        assert torch.equal(*both) == equal
        assert torch.equal(*(sign_codes(x, normals) for normals in both)) == equal


# Same hypothesis and statistic, |z| < 5.5 at x = 0 and .5. Bits of one rotation are negatively dependent: the rate falls
# by 29 % at x = 0 and by 18 % at x = .5, which are 5 and 9 standard deviations of these 1500 draws.
@pytest.mark.statistical
@pytest.mark.parametrize("layout", [interleaved, contiguous])
def test_bits_of_a_code_must_not_share_a_rotation(layout):
    normals = layout(hadamard_rotations(streams(1500), "t", 8, 32))
    scores = []
    for x in (0.0, 0.5):
        codes, bits = collisions(normals, dense_pairs(x, 32, 1500))
        p = 1 - math.acos(x) / math.pi
        assert abs(z_score(bits, p)) < 5.5, "single bits are right in both layouts"
        scores.append(z_score(codes, p**8))
    assert (max(map(abs, scores)) < 5.5) == (layout is interleaved), f"{layout.__name__}: z = {scores}"


# H0: the share of collisions among 48 codes varies like that of independent codes. Statistic: variance over draws divided
# by p(1-p)/48; its standard error is about 5 %, so 1.25 is five of them. Codes that share bits reach 1.5.
@pytest.mark.statistical
@pytest.mark.parametrize("layout", ["library", "wrapped"])
def test_codes_must_not_share_coordinates(layout):
    draws, bits, codes, size = 1000, 10, 48, 64
    if layout == "library":
        normals = one_by_one("hadamard", bits, size, streams(draws), hashes=codes)
    else:  # two bits per rotation, whose coordinates run past the end and start again
        h, b = torch.arange(codes), torch.arange(bits)[:, None]
        rotations = hadamard_rotations(streams(draws), "t", 8, size)
        normals = rotations[:, (b % 8).expand(bits, codes), (h * 2 + b // 8) % size]
    share, _ = collisions(normals, dense_pairs(0.8, size, draws))
    p = (1 - math.acos(0.8) / math.pi) ** bits
    ratio = float(share.var() / (p * (1 - p) / codes))
    assert (ratio < 1.25) == (layout == "library"), f"{layout}: variance {ratio:.2f} of independent codes"


# H0: |rate of equal bits - p| < .006 for vectors of one and two entries. The rate of the library is off by .002; over 400
# draws of 64 codes its standard error is .001. With two rounds of signs it is off by .013.
@pytest.mark.statistical
@pytest.mark.parametrize("rounds", [3, 2])
def test_sparse_vectors_need_three_rounds_of_signs(rounds):
    normals = hadamard_rotations(streams(400), "t", 8, 64)
    if rounds == 2:  # another H takes the last one off, and the signs before it do not move a hyperplane
        normals = hadamard_matrix(64) @ normals
    worst = 0.0
    for x in (0.0, 0.5, 0.9):
        _, bits = collisions(normals, sparse_pairs(x, 64, 400))
        worst = max(worst, abs(float(bits.mean()) - (1 - math.acos(x) / math.pi)))
    assert (worst < 0.006) == (rounds == 3), f"{rounds} rounds: bits agree with an error of {worst:.4f}"


# A vector of one or two entries has few values after a rotation, so the law holds up to a margin: .006 of a bit's rate,
# and .03 near x = .7, where the two entries are almost equal and often cancel. H0: the rate is within the margin.
# Statistic: z of the excess over 500 draws, at places drawn anew; z < 5.5, 4 assertions per width: rate 8 * 2e-8.
@pytest.mark.statistical
@pytest.mark.parametrize(("width", "coordinates"), [(16, 64), (20, 64), (16, 16), (20, 32)])
def test_sparse_narrow_vectors_follow_the_law_up_to_a_margin(width, coordinates, monkeypatch):
    monkeypatch.setattr(hashing, "_COORDINATES", coordinates)
    normals = torch.cat([one_by_one("hadamard", 8, width, streams(250, seed)) for seed in range(2)])
    worst = 0.0
    for x, margin in ((0.0, 0.006), (0.5, 0.006), (0.7, 0.03), (0.9, 0.006)):
        _, bits = collisions(normals, sparse_pairs(x, width, 500))
        away = abs(float(bits.mean()) - (1 - math.acos(x) / math.pi)) - margin
        worst = max(worst, away / (float(bits.std()) / math.sqrt(500)))
    assert (worst < 5.5) == (coordinates == 64), f"{coordinates} coordinates: {worst:.1f} beyond the margin"
