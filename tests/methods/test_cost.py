"""What `cost()` says against what runs: matrix products counted by torch, and work that grows linearly."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import sparing
from sparing import native
from sparing.contract import Shape
from sparing.maths import linear
from sparing.workbench import memory
from tests.support.allocations import all_elements

N, WIDTH, HEADS = 1024, 64, 2
TOLERANCE = 0.15  # exponentials, sums and other elementwise work are in the model and not in the counter


def nothing(shape: Shape) -> float:
    return 0.0


def svd(shape: Shape) -> float:  # inside the pseudo-inverse
    return 22.0 * 64**3


def cholesky(shape: Shape) -> float:  # of the kernel among all rows, and the solve
    rows = shape.queries + shape.keys
    return rows**3 / 3 + 2 * rows**2 * shape.value_dim


def distances(shape: Shape) -> float:  # of all values from all outputs, from differences: not a product
    return 3.0 * shape.queries * shape.keys * shape.value_dim


# Per method what the model counts and the counter does not see, for one head. Beside that, neither counts the drawing
# of random matrices (it does not grow with the length), sorting and searching. Not in the table: monte_carlo, whose
# work is sampled sums of rows and no matrix product, and value_aware, whose pursuit ends when the data allows.
TABLE: list[tuple[str, Callable[[Shape], float]]] = [
    ("exact", nothing),
    ("kernel", nothing),
    ("kernel(kind=elu)", nothing),
    ("kernel(kind=elu, normalize=none)", nothing),
    ("kernel(kind=poly)", nothing),
    ("kernel(kind=poly, degree=4)", nothing),
    ("kernel(kind=gaussian)", nothing),
    ("kernelized", nothing),
    ("random_features", nothing),
    ("random_features(features=32)", nothing),
    ("linformer", nothing),
    ("linformer(projection=pooled)", nothing),
    ("nystrom", nothing),
    ("nystrom(landmarks=2000)", nothing),
    ("nystrom(solver=exact)", svd),
    ("skyformer", nothing),
    ("skyformer(kernel=softmax)", nothing),
    ("skyformer(solver=newton_schulz)", nothing),
    ("skyformer(landmarks=3000)", nothing),
    ("skyformer(sampling=all)", cholesky),
    ("window", nothing),
    ("window(size=900)", nothing),
    ("window(size=32, sinks=16)", nothing),
    ("window(size=32, global_tokens=16)", nothing),
    ("window(size=4096)", nothing),
    ("lsh", nothing),
    ("lsh(combine=sum)", nothing),
    ("lsh(align=rank)", nothing),
    ("lsh(buckets=8)", nothing),
    ("lsh(buckets=128)", nothing),
    ("lsh(chunk=2048)", nothing),
    ("yoso", nothing),
    ("yoso(hash=gaussian, bits=4)", nothing),
    ("yoso(expectation=True)", nothing),
    ("top_keys", nothing),
    ("sampled", nothing),
    ("sampled(proposal=value_norm)", nothing),
    ("sampled(proposal=deviation, form=self_normalized)", distances),
]
CASES = [
    pytest.param(spec, unseen, causal, id=f"{spec}-{'causal' if causal else 'all'}")
    for spec, unseen in TABLE
    for causal in (False, True)[: 1 + sparing.method(spec).supports.causal]
]


def fused(q: list[int], k: list[int], v: list[int], dropout: float = 0.0, causal: bool = False, **_: object) -> float:
    """FLOPs of torch's attention on the CPU, which its counter does not know; causal calls skip the hidden half."""
    return 2 * q[0] * q[1] * q[2] * k[2] * (q[3] + v[3]) * (0.5 if causal else 1.0)


def counted(spec: str, causal: bool, n: int = N) -> float:
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, HEADS, n, WIDTH, generator=generator).unbind(0)
    known = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: fused}
    # By plain PyTorch: its counter does not see into kernels.
    with torch.no_grad(), native.switched_off(), FlopCounterMode(display=False, custom_mapping=known) as counter:
        sparing.attention(q, k, v, method=spec, is_causal=causal, seed=0)
    return counter.get_total_flops()


def shape_of(causal: bool, n: int = N) -> Shape:
    return Shape(heads=HEADS, queries=n, keys=n, head_dim=WIDTH, value_dim=WIDTH, causal=causal)


def agree(model: float, found: float, tolerance: float = TOLERANCE) -> bool:
    return abs(model / found - 1) <= tolerance


@pytest.mark.parametrize(("spec", "unseen", "causal"), CASES)
def test_flops_are_what_runs(spec, unseen, causal):
    shape = shape_of(causal)
    model = sparing.method(spec).cost(shape).flops - HEADS * unseen(shape)
    found = counted(spec, causal)
    assert agree(model, found), f"{spec}: model {model:.4g}, counted {found:.4g}, ratio {model / found:.3f}"


def test_the_table_holds_every_method():
    # What key_clusters, multipole and skip run on PyTorch are dense specifications; test_key_clusters_calls.py,
    # test_multipole.py and test_skip.py hold their cost to what was read.
    elsewhere = {"monte_carlo", "value_aware", "key_clusters", "multipole", "skip"}
    assert {sparing.method(spec).name for spec, _ in TABLE} == set(sparing.list_methods()) - elsewhere


def test_a_model_without_the_products_inside_a_block_is_noticed():
    shape = shape_of(causal=True)
    tokens = shape.queries + shape.keys
    only_the_state = HEADS * tokens * WIDTH * (2 * WIDTH + 4)
    assert not agree(only_the_state, counted("kernel(kind=elu)", True))


def test_value_aware_within_a_factor():
    # How many keys are dropped again on the way to the best weights depends on the data.
    shape = shape_of(False, 128)
    for spec in ("value_aware(keys=4)", "value_aware(keys=16)", "value_aware(keys=4, corrective=False)"):
        model = sparing.method(spec).cost(shape).flops - HEADS * distances(shape)
        found = counted(spec, False, 128)
        assert agree(model, found, 0.35), f"{spec}: ratio {model / found:.3f}"


# Work


def work(run: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor], n: int) -> int:
    """Elements made by a forward and a backward pass."""
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 1, n, 16, generator=generator).requires_grad_() for _ in range(3))
    return all_elements(lambda: run(q, k, v).sum().backward())


def grows_linearly(run: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]) -> bool:
    return work(run, 8192) < 5 * work(run, 2048)


@pytest.mark.parametrize(
    ("spec", "causal"),
    [
        ("kernel(kind=elu)", True),
        ("kernel(kind=elu)", False),
        ("random_features(features=32)", True),
        ("window(size=64)", True),
        ("window(size=64, sinks=4, global_tokens=2)", True),
        ("yoso(hashes=4, bits=6)", True),
        ("yoso(hashes=4, bits=6)", False),
        ("nystrom(landmarks=16)", False),
        ("skyformer(landmarks=16)", False),
        ("lsh(rounds=2, chunk=32, buckets=64)", True),
        ("lsh(rounds=2, chunk=32, buckets=64)", False),
    ],
)
def test_forward_and_backward_are_linear(spec, causal):
    assert grows_linearly(lambda q, k, v: sparing.attention(q, k, v, method=spec, is_causal=causal, seed=0))


def by_slices(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Linear attention whose loop slices: the gradient of every slice is as long as the sequence."""
    state, out = q.new_zeros(q.shape[-1], v.shape[-1]), []
    for start in range(0, q.shape[-2], linear.BLOCK):
        rows = slice(start, start + linear.BLOCK)
        mine = q[..., rows, :], k[..., rows, :], v[..., rows, :]
        out.append(mine[0] @ state + (mine[0] @ mine[1].mT).tril() @ mine[2])
        state = state + mine[1].mT @ mine[2]
    return torch.cat(out, dim=-2)


def test_a_loop_over_slices_is_not_linear():
    assert not grows_linearly(by_slices)
    assert not grows_linearly(lambda q, k, v: sparing.attention(q, k, v, method="kernel(kind=poly)", is_causal=True))


# Memory


PEAK = """
import sys
from contextlib import nullcontext
import torch
import sparing
from sparing import native
from sparing.workbench import memory

spec, plain, *sizes = sys.argv[1:]
batch, heads, width = map(int, sizes)
x = torch.randn(batch, heads, 1, width)
with native.switched_off() if plain == "True" else nullcontext(), torch.no_grad():
    sparing.attention(x[:1, :1], x[:1, :1], x[:1, :1], method="random_features(features=8)", seed=0)
    print(memory.peak_extra_bytes(lambda: sparing.attention(x, x, x, method=spec, seed=0)))
"""


@pytest.mark.skipif(not memory.can_measure(), reason="this system does not tell a peak of memory")
@pytest.mark.parametrize(
    ("spec", "batch", "heads", "width"),
    [
        ("random_features(features=32768)", 1, 2, 64),  # the projection is the most
        ("random_features(features=32768, orthogonal=False)", 1, 2, 64),
        ("random_features(features=256)", 1, 8, 512),  # blocks beyond the features
        ("random_features(features=8192)", 16, 2, 64),  # the tables are the most
    ],
)
@pytest.mark.parametrize("plain", [False, True])
def test_memory_of_random_features_is_what_a_call_takes(spec, batch, heads, width, plain):
    """The model covers the peak of a call on one token, and no more than twice that; without kernels within 1.7 times."""
    shape = Shape(batch=batch, heads=heads, queries=1, keys=1, head_dim=width, value_dim=width)
    arguments = [spec, str(plain), *map(str, (batch, heads, width))]
    done = subprocess.run([sys.executable, "-c", PEAK, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    model, found = sparing.method(spec).cost(shape).bytes, int(done.stdout)
    assert 0.5 < found / model < (1.7 if plain else 1.1), f"model {model / 2**20:.0f} MiB, found {found / 2**20:.0f}"
