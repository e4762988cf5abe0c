"""The counter-based generator: published known answers, layout, moments, independence, and folded seeds."""

import math
import os
import subprocess
import sys

import pytest
import torch

import sparing
from sparing.draws import Draws, fold, philox

# Philox4x32-10: counter, key, result. The last one holds digits of pi.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def assert_known_answers(generator):
    for counter, key, wanted in KNOWN:
        found = generator(tuple(torch.tensor([word]) for word in counter), key)
        assert [int(word) for word in found] == list(wanted), f"counter {counter}, key {key}"


def draws(seed=0, heads=1):
    return Draws(seed, torch.arange(heads))


def assert_uncorrelated(a, b):
    """H0: a and b are independent standard uniforms; z = sqrt(n) corr is standard normal; |z| < 5.73 is family-wise
    1e-6 over 100 comparisons. With n = 40 000 a correlation of .05 has z = 10.
    """
    z = float(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]) * math.sqrt(a.numel())
    assert abs(z) < 5.73, f"correlated: z = {z:.1f}"


def test_known_answers():
    assert_known_answers(philox)


def test_known_answers_catch_a_lost_carry_and_a_stuck_key():
    def signed_shift(counter, key):  # halves of the product without masking the sign bits
        c0, c1, c2, c3 = counter
        k0, k1 = key
        for _ in range(10):
            p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
            c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & 0xFFFFFFFF, (p0 >> 32) ^ c3 ^ k1, p0 & 0xFFFFFFFF
            k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
        return c0, c1, c2, c3

    def stuck_key(counter, key):
        c0, c1, c2, c3 = counter
        for _ in range(10):
            p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
            high0, high1 = (p0 >> 32) & 0xFFFFFFFF, (p1 >> 32) & 0xFFFFFFFF
            c0, c1, c2, c3 = high1 ^ c1 ^ key[0], p1 & 0xFFFFFFFF, high0 ^ c3 ^ key[1], p0 & 0xFFFFFFFF
        return c0, c1, c2, c3

    for broken in (signed_shift, stuck_key):
        with pytest.raises(AssertionError):
            assert_known_answers(broken)


def test_bits_at_agrees_with_bits():
    d = draws(5, heads=3)
    wanted = d.bits("x", 7, 5)
    assert wanted.shape == (3, 7, 5)
    assert torch.equal(d.bits_at("x", torch.arange(35).view(1, 7, 5)), wanted)
    order = torch.randperm(35, generator=torch.Generator().manual_seed(0))
    assert torch.equal(d.bits_at("x", order[None]), wanted.flatten(1)[:, order])
    by_head = torch.stack([torch.arange(4), torch.arange(8, 12), torch.arange(4)])  # an index per head
    assert torch.equal(d.bits_at("x", by_head), wanted.flatten(1).gather(1, by_head))


def test_a_longer_request_begins_with_the_shorter_one():
    d = draws(1, heads=2)
    assert torch.equal(d.bits("x", 1001)[:, :13], d.bits("x", 13))
    assert torch.equal(d.normal("x", 40, 3)[:, :9], d.normal("x", 9, 3))


def test_bits_are_32_bit_and_uniforms_open():
    d = draws(2, heads=4)
    bits = d.bits("x", 20_000)
    assert int(bits.min()) >= 0
    assert int(bits.max()) < 2**32
    assert int(bits.max()) > 2**31
    uniform = d.uniform("x", 20_000)
    assert uniform.dtype == torch.float64
    assert torch.equal(uniform, (bits.double() + 0.5) / 2**32)
    ends = (torch.tensor([0.0, 2**32 - 1.0], dtype=torch.float64) + 0.5) / 2**32  # what the extreme words give
    assert float(ends[0]) > 0
    assert float(ends[1]) < 1
    assert bool(d.normal("x", 20_000).isfinite().all())


def test_indices_beyond_32_bits_differ():
    d = draws(0)
    low = torch.arange(64)[None]
    assert not torch.equal(d.bits_at("x", low), d.bits_at("x", low + 2**34))
    assert not torch.equal(d.bits_at("x", low), d.bits_at("x", low + 2**36))


def test_every_part_of_the_key_matters():
    base = draws(0, heads=2).bits("x", 64)
    assert torch.equal(base, draws(0, heads=2).bits("x", 64))
    assert not torch.equal(base, draws(0, heads=2).bits("y", 64))
    assert not torch.equal(base, draws(1, heads=2).bits("x", 64))
    assert not torch.equal(base, draws(1 << 40, heads=2).bits("x", 64))
    assert not torch.equal(base[0], base[1])
    again = Draws(0, torch.tensor([1, 0, 1])).bits("x", 64)  # the stream decides, not the slot
    assert torch.equal(again, base[[1, 0, 1]])


def test_known_answer_of_a_draw():
    """Seed, purpose, stream and index meet in the counter as they always did: results stay what they were."""
    found = Draws(1 + 2**40, torch.tensor([0, 7])).bits("x", 4)
    assert found.tolist() == [
        [0xDEE0E53D, 0xDE482F7E, 0x4CF4F866, 0x0654658B],
        [0x79108D8A, 0x12BDDD00, 0xB3BFEEC8, 0xEBA52421],
    ]


# What a fresh process prints: a digest of two stochastic methods, and what `hash(purpose)` would have made of a draw.
PROGRAM = """
import hashlib, torch, sparing
from sparing.draws import Draws
q, k, v = (torch.sin(torch.arange(3.0 * 2 * 40 * 8) * 0.7).view(3, 1, 2, 40, 8) * 2).unbind(0)
digest = hashlib.sha256()
for method in ("random_features(features=16)", "yoso(hashes=4)"):
    digest.update(sparing.attention(q, k, v, method=method, seed=5).numpy().tobytes())
print(digest.hexdigest(), Draws(hash("x") & 0xFFFF, torch.tensor([0])).bits("x", 4).tolist())
"""


def test_another_process_draws_the_same():
    printed = []
    for hash_seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM], env={**os.environ, "PYTHONHASHSEED": hash_seed, "OMP_NUM_THREADS": "1"},
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        printed.append(done.stdout.split(maxsplit=1))
    assert printed[0][0] == printed[1][0]
    assert printed[0][1] != printed[1][1], "the control: a draw that is keyed by hash() differs between processes"


def test_the_global_generator_is_not_touched():
    before = torch.get_rng_state()
    draws(3, heads=2).normal("x", 100)
    fold(3, 4)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.statistical
def test_moments():
    """H0: the stated law. z of the sample mean of x^p against E x^p, with the law's own variance; N = 7 assertions at
    |z| < 5.33 (10 assertions, family-wise 1e-6). With 200 000 numbers a mean off by 1.2e-2 sd fails.
    """
    d, n = draws(11), 200_000
    u, g, s = (x.flatten() for x in (d.uniform("u", n), d.normal("g", n), d.signs("s", n)))
    cases = [("uniform", u, p, 1 / (p + 1), 1 / (2 * p + 1)) for p in (1, 2, 3)]
    cases += [("normal", g, p, mean, second) for p, mean, second in ((1, 0, 1), (2, 1, 3), (4, 3, 105))]
    cases += [("signs", s, 1, 0, 1)]
    for name, x, p, mean, second in cases:
        z = float(x.pow(p).mean() - mean) / math.sqrt((second - mean**2) / n)
        assert abs(z) < 5.33, f"{name}: E x^{p}: z = {z:.1f}"
    assert set(s.unique().tolist()) == {-1.0, 1.0}


@pytest.mark.statistical
@pytest.mark.parametrize("d", [1, 2, 5, 64])
def test_norms_of_normal_vectors_follow_their_law(d):
    """H0: squares are chi-square with d degrees: mean d, variance 2 d, E (x - d)^4 = 12 d (d + 4). Mean and variance,
    8 assertions over the widths at |z| < 5.3 (family-wise 1e-6), 40 000 norms."""
    squares = draws(13).normal_norms("r", 40_000, d)[0].square()
    z = float(squares.mean() - d) / math.sqrt(2 * d / len(squares))
    off = (squares - d).square()
    spread = float(off.mean() - 2 * d) / math.sqrt((12 * d * (d + 4) - 4 * d * d) / len(squares))
    assert max(abs(z), abs(spread)) < 5.3, f"z = {z:.1f}, of the variance {spread:.1f}"


@pytest.mark.statistical
def test_each_bit_is_fair():
    """H0: each of the 32 bits is 1 with probability 1/2; z over 100 000 words; 32 assertions, |z| < 5.73."""
    bits = draws(7).bits("x", 100_000).flatten()
    ones = ((bits.unsqueeze(-1) >> torch.arange(32)) & 1).double().mean(0)
    assert float((ones - 0.5).abs().max()) * 2 * math.sqrt(100_000) < 5.73


@pytest.mark.statistical
def test_purposes_streams_seeds_and_indices_are_independent():
    d = draws(21, heads=2)
    x = d.uniform("a", 40_000)
    assert_uncorrelated(x[0], x[1])
    assert_uncorrelated(x[0], d.uniform("b", 40_000)[0])
    assert_uncorrelated(x[0], draws(22).uniform("a", 40_000)[0])
    assert_uncorrelated(x[0], draws(fold(21, 1)).uniform("a", 40_000)[0])
    for lag in (1, 2, 3, 4, 64):
        assert_uncorrelated(x[0, :-lag], x[0, lag:])


@pytest.mark.statistical
def test_independence_fails_for_shared_and_mirrored_streams():
    x = draws(21).uniform("a", 40_000)[0]
    for broken in (x, 1 - x, 0.9 * draws(22).uniform("a", 40_000)[0] + 0.1 * x):
        with pytest.raises(AssertionError, match="correlated"):
            assert_uncorrelated(x, broken)


def test_fold_gives_one_seed_per_part():
    seeds = {fold(0, layer, step) for layer in range(20) for step in range(20)}
    assert len(seeds) == 400
    assert all(0 <= s < 2**63 for s in seeds)
    assert fold(5, 1, 2) == fold(5, 1, 2) == fold(fold(5, 1), 2)
    assert fold(5, 1, 2) != fold(5, 2, 1)
    assert fold(5, 1) != fold(6, 1)
    assert fold(5) == 5
    assert fold(0, 2**32) != fold(0, 0)


@pytest.mark.parametrize("bad", [True, 1.5, "3"])
def test_every_door_refuses_the_same_seeds_in_the_same_words(bad):
    q = torch.randn(1, 1, 4, 8)
    for use in (
        lambda: sparing.attention(q, q, q, seed=bad),
        lambda: sparing.Index("window", seed=bad),
        lambda: sparing.nn.MultiheadAttention(8, 1, seed=bad),
        lambda: sparing.Recipe({}, seed=bad),
    ):
        with pytest.raises(
            TypeError, match=rf"seed={bad!r} must be an integer or None; integers are used modulo 2\^64"
        ):
            use()


def test_seeds_of_any_size_are_used_modulo_two_to_the_64():
    q = torch.randn(1, 1, 40, 8)
    wanted = sparing.attention(q, q, q, method="yoso(hashes=2)", seed=7)
    for seed in (7 + 2**64, 7 - 2**64, 7 + 2**70):
        assert torch.equal(sparing.attention(q, q, q, method="yoso(hashes=2)", seed=seed), wanted)
