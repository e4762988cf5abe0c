"""What kernels of `monte_carlo` keep with a weight: found again, never stale, and gone with the weight."""

import copy
import gc
import pickle
import threading
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import sparing
from sparing import Projection, native
from sparing.methods.monte_carlo import kept
from sparing.methods.monte_carlo.kept import tables_of
from tests.support.kernel_checks import every_instruction_set, needs_kernels
from tests.support.model_zoo import build, run, tokens

pytestmark = needs_kernels
METHOD = "monte_carlo(alpha=2.0)"


class Preparations(TorchDispatchMode):
    """Counts how often tables are made."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.sparing.projection_tables.default
        return func(*args, **(kwargs or {}))


def inputs(dtype=torch.float32, heads=2):
    gen = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, heads, 12, 8, generator=gen).to(dtype).unbind(0)
    weight = torch.randn(heads * 4, 40, generator=gen) * torch.logspace(0, -1, 40)
    return q, k, torch.randn(1, 12, 40, generator=gen).to(dtype), weight.to(dtype)


def call(weight, dtype=torch.float32, method=METHOD, heads=2):
    q, k, x, _ = inputs(dtype, heads)
    with torch.no_grad():
        return sparing.attention(q, k, Projection(x, weight), method=method, seed=0)


def prepared(function):
    with Preparations() as seen:
        function()
    return seen.count


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("method", [METHOD, "monte_carlo(alpha=2.0, samples=shared)"])
def test_tables_are_made_once(dtype, method):
    weight = inputs(dtype)[3]
    fresh = call(weight.clone(), dtype, method)
    assert prepared(lambda: call(weight, dtype, method)) == 1
    assert prepared(lambda: call(weight, dtype, method)) == 0
    assert torch.equal(call(weight, dtype, method), fresh)
    assert prepared(lambda: call(weight.clone(), dtype, method)) == 1


def by_numpy(weight):
    weight.detach().numpy()[3, 5] += 1


def by_optimizer(weight):
    weight.grad = torch.ones_like(weight)
    torch.optim.Adam([weight], lr=0.1).step()


def by_inference_mode(weight):
    with torch.inference_mode():
        weight.mul_(1.5)


CHANGES = {
    "in place": lambda weight: weight.detach().mul_(2),
    "through data, which counts no version": lambda weight: weight.data.mul_(2),
    "one entry, to the next number": lambda weight: weight.data[7].copy_(
        torch.nextafter(weight.data[7], weight.data[6])
    ),
    "the sign of all": lambda weight: weight.data.neg_(),
    "the order of rows": lambda weight: weight.data.copy_(weight.data.flip(0)),
    "the order of features": lambda weight: weight.data.copy_(weight.data.roll(8, 1)),
    "other memory": lambda weight: setattr(weight, "data", weight.data.flip(1).clone()),
    "numpy": by_numpy,
    "an optimizer": by_optimizer,
    "inference mode": by_inference_mode,
}


def assert_never_stale(change):
    weight = torch.nn.Parameter(inputs()[3])
    before = call(weight)
    change(weight)
    after = call(weight)
    assert not torch.equal(after, before)
    assert torch.equal(after, call(weight.detach().clone())), "stale"


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_changed_weight_gives_the_numbers_of_a_fresh_call(change):
    assert_never_stale(change)


def test_tables_that_ignore_changes_would_be_stale(monkeypatch):
    """Control. A version counter alone misses what is written through `data`."""
    monkeypatch.setattr(kept, "_same", lambda *fingerprints: True)
    for name in ("in place", "through data, which counts no version", "the sign of all"):
        with pytest.raises(AssertionError):
            assert_never_stale(CHANGES[name])


@pytest.mark.parametrize("size", [1, 3, 8, 15, 16, 33, 500, 4099])
def test_the_fingerprint_sees_each_entry(size):
    weight = torch.randn(1, size, generator=torch.Generator().manual_seed(0))
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        typed = weight.to(dtype)
        seen = {tuple(torch.ops.sparing.weight_fingerprint(typed).tolist())}
        for place in {0, size // 3, size // 2, size - 1}:
            typed[0, place] = -typed[0, place]
            seen.add(tuple(torch.ops.sparing.weight_fingerprint(typed).tolist()))
        assert len(seen) == len({0, size // 3, size // 2, size - 1}) + 1


def test_tables_go_with_the_weight():
    weight = inputs()[3]
    tables = weakref.ref(tables_of(weight, 2).rows)
    view = weight[:4]
    del weight
    gc.collect()
    assert tables() is not None  # the memory lives
    del view
    gc.collect()
    assert tables() is None
    parameter = torch.nn.Parameter(inputs()[3])
    call(parameter)
    before = weakref.ref(tables_of(parameter, 2).rows)
    parameter.data.mul_(2)
    call(parameter)
    assert before() is None  # of the old entries


def test_heads_views_and_types_have_tables_of_their_own():
    whole = torch.randn(16, 40, generator=torch.Generator().manual_seed(2))
    for _ in range(2):
        for part in (whole[:8], whole[8:], whole[4:12]):
            assert torch.equal(call(part), call(part.clone()))
        assert torch.equal(call(whole[:8], heads=1), call(whole[:8].clone(), heads=1))
        columns = whole.mT.contiguous().mT[:8]  # not contiguous
        assert torch.equal(call(columns), call(whole[:8].clone()))


@every_instruction_set
def test_each_instruction_set_has_its_own_layout(isa):
    weight = inputs()[3]
    wanted = call(weight)
    with native.instruction_set(isa):
        torch.testing.assert_close(call(weight), wanted, rtol=1e-5, atol=1e-5)
        assert torch.equal(call(weight), call(weight.clone()))
    assert torch.equal(call(weight), wanted)


def test_modules_find_the_tables_of_their_weights():
    layer = sparing.nn.MultiheadAttention(32, 2, batch_first=True, method=METHOD).eval()
    x = torch.randn(1, 12, 32)
    with torch.no_grad():
        assert prepared(lambda: layer(x, x, x)) == 1
        assert prepared(lambda: layer(x, x, x)) == 0
        out = layer(x, x, x)[0]
        torch.nn.init.xavier_uniform_(layer.in_proj_weight)
        assert not torch.equal(layer(x, x, x)[0], out)
        assert torch.equal(layer(x, x, x)[0], copy.deepcopy(layer)(x, x, x)[0])
        assert torch.equal(layer(x, x, x)[0], pickle.loads(pickle.dumps(layer))(x, x, x)[0])
    with torch.inference_mode():
        assert prepared(lambda: layer(x, x, x)) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_models_find_the_tables_of_their_weights(dtype):
    model = build("bert").to(dtype)
    x = {"input_ids": tokens(12, 2)}
    layers = len(model.encoder.layer)
    with sparing.approximate(model, METHOD, seed=0):
        run(model, x)  # checks how the values are split
        first = prepared(lambda: run(model, x))
        assert first <= layers
        assert prepared(lambda: run(model, x)) == 0
        out = run(model, x)
        model.load_state_dict({name: 1.5 * t if "value" in name else t for name, t in model.state_dict().items()})
        changed = run(model, x)
        assert not torch.equal(changed, out)
        assert prepared(lambda: run(model, x)) == 0
    other = build("bert").to(dtype)
    other.load_state_dict(model.state_dict())
    with sparing.approximate(other, METHOD, seed=0):
        run(other, x)
        assert torch.equal(run(other, x), changed)


def test_a_compiled_call_keeps_them_too():
    weight = inputs()[3]
    q, k, x, _ = inputs()
    compiled = torch.compile(
        lambda weight: sparing.attention(q, k, Projection(x, weight), method=METHOD, seed=0), fullgraph=True,
        backend="aot_eager",
    )  # fmt: skip
    with torch.no_grad():
        assert torch.equal(compiled(weight), call(weight))
        before = tables_of(weight, 2).rows
        weight.mul_(2)
        assert torch.equal(compiled(weight), call(weight.clone()))
        assert tables_of(weight, 2).rows is not before


def test_training_keeps_nothing():
    q, k, x, weight = inputs()
    weight.requires_grad_()
    for _ in range(2):
        sparing.attention(q, k, Projection(x, weight), method=METHOD, seed=0).sum().backward()
    assert not hasattr(weight.untyped_storage(), kept._TABLES)


def test_threads_share_them():
    weights = [inputs()[3] * scale for scale in (1.0, 2.0)]
    wanted = [call(weight.clone()) for weight in weights]
    found = []

    def work():
        found.append(all(torch.equal(call(w), out) for _ in range(20) for w, out in zip(weights, wanted, strict=True)))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 4


def test_tables_that_do_not_fit_are_refused():
    _, _, x, weight = inputs()
    tables = tables_of(weight, 2)._asdict()
    counts, ranks = torch.full((1, 2, 12), 3), torch.arange(12).expand(1, 2, 12).contiguous()
    given = {"x": x, "weight": weight, "bias": None, "counts": counts, "ranks": ranks, "streams": torch.arange(2),
             "seed": 0, "purpose": 0, "shared": False, "stratified": False}  # fmt: skip
    torch.ops.sparing.sampled_projection(**given, **tables)
    for name, broken in (
        ("rows", tables["rows"][:1]),
        ("inverse", tables["inverse"].double()),
        ("ladder", torch.zeros_like(tables["ladder"])),
        ("starts", tables["starts"] + 40),
        ("starts", tables["starts"] - 1),
    ):
        with pytest.raises(RuntimeError, match=name):
            torch.ops.sparing.sampled_projection(**given, **{**tables, name: broken})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16], ids=str)
def test_opcheck(dtype):
    weight = torch.randn(6, 9).to(dtype)
    torch.library.opcheck(torch.ops.sparing.weight_fingerprint, (weight,))
    torch.library.opcheck(torch.ops.sparing.projection_tables, (weight, 3))
