"""Spec strings, fields and the registry."""

from dataclasses import dataclass, fields

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sparing
from sparing import Method, Shape, method
from sparing.contract import knob
from sparing.spec import split_specs


def test_specs_parse_like_python_calls():
    assert method("nystrom") == method("nystrom()") == method(" nystrom ( landmarks = 64 ) ")
    assert method("nystrom(landmarks=8, solver=exact)") == method("nystrom(solver='exact', landmarks=8)")
    assert method("nystrom(landmarks=8)").landmarks == 8
    assert method("random_features(orthogonal=False)").orthogonal is False
    assert method("nystrom(convolution=None)") == method("nystrom")
    assert method(method("exact")) == method("exact")


def test_the_alias_of_the_paper():
    assert method("kernelized") == method("kernel(kind=gaussian, normalize=none)")
    assert method("kernelized(normalize=row)") == method("kernel(kind=gaussian, normalize=row)")


@given(landmarks=st.integers(1, 10**6), iterations=st.integers(1, 50), solver=st.sampled_from(["iterative", "exact"]))
def test_str_parses_back(landmarks, iterations, solver):
    one = method(f"nystrom(landmarks={landmarks}, iterations={iterations}, solver={solver})")
    assert method(str(one)) == one
    assert f"landmarks={landmarks}" in str(one)


@pytest.mark.parametrize(
    "spec",
    ["", "nystrom(", "nystrom)(", "nystrom(64)", "nystrom(landmarks)", "nystrom(landmarks=2+2)", "a.b", "nystrom; exact",
     "nystrom(landmarks=__import__('os'))", "nystrom(landmarks=1, landmarks=2)", "nystrom(**{})", "3", "exact\0",
     "exact\ud800", "nystrom(landmarks='\ud800')", "nystrom(landmarks=" + "-" * 900 + "1)", "-" * 999, "[" * 999,
     "nystrom(landmarks={[]: 1})", "9" * 999],
)  # fmt: skip
def test_nothing_else_parses(spec):
    with pytest.raises(ValueError, match="method: cannot read the spec"):
        method(spec)


@pytest.mark.parametrize(
    "spec", ["(" * 5000, "-" * 5000, "9" * 10_000, "nystrom(landmarks=" + "9" * 10_000 + ")", "a" * 10**6]
)
def test_long_specs_are_refused_before_they_are_parsed(spec):
    with pytest.raises(
        ValueError, match=rf"^method: the spec .*\.\.\. has {len(spec)} characters; at most 1000 are allowed$"
    ):
        method(spec)


def test_unknown_names_and_fields_list_the_known_ones():
    with pytest.raises(ValueError, match=r"unknown name 'softmaxRBF32'.*exact.*nystrom"):
        method("softmaxRBF32")
    with pytest.raises(ValueError, match=r"nystrom has no field 'rank'.*landmarks"):
        method("nystrom(rank=3)")
    with pytest.raises(ValueError, match="it has no fields"):
        method("exact(scale=2)")


@pytest.mark.parametrize(
    ("spec", "kind", "words"),
    [
        ("nystrom(landmarks=0)", ValueError, "nystrom: landmarks=0 must be at least 1"),
        ("nystrom(landmarks=2.5)", TypeError, "landmarks=2.5 must be of type int"),
        ("nystrom(landmarks=True)", TypeError, "landmarks=True must be of type int"),
        ("nystrom(landmarks=None)", TypeError, "landmarks=None must be of type int"),
        ("nystrom(landmarks='8')", TypeError, "landmarks='8' must be of type int"),
        ("nystrom(solver=qr)", ValueError, "solver='qr' is not one of 'iterative', 'exact'"),
        ("nystrom(convolution='x')", TypeError, "convolution='x' must be of type int or None"),
        ("random_features(orthogonal=1)", TypeError, "orthogonal=1 must be of type bool"),
    ],
)
def test_fields_are_checked(spec, kind, words):
    with pytest.raises(kind) as caught:
        method(spec)
    assert words in str(caught.value)


@pytest.mark.parametrize("value", [2**31, 2**63, 10**900])
def test_every_integer_has_an_upper_bound(value):
    """Before anything overflows: the fields of all methods, oracles included."""
    seen = 0
    for name, cls in sparing.list_methods().items():
        for each in fields(cls):
            if "choices" in each.metadata or int not in (type(each.default), each.metadata.get("kind")):
                continue
            seen += 1
            with pytest.raises(ValueError, match=rf"^{name}: {each.name}=.* must be at most \d+$"):
                method(f"{name}({each.name}={value})")
    assert seen >= 20


@pytest.mark.parametrize("value", ["1e308", "1e31", "1e999", "9" * 900])
def test_every_float_has_an_upper_bound(value):
    seen = 0
    for name, cls in sparing.list_methods().items():
        for each in fields(cls):
            if type(each.default) is float:
                seen += 1
                with pytest.raises(
                    ValueError, match=rf"^{name}: {each.name}=.* must be (at most (1e\+30|1\.0)|finite)$"
                ):
                    method(f"{name}({each.name}={value})")
    assert seen >= 3


def test_errors_of_numbers_that_python_does_not_write():
    with pytest.raises(ValueError, match="hashes=an integer of 16610 bits must be at most 2147483647"):
        sparing.list_methods()["yoso"](hashes=10**5000)


def test_number_fields():
    @dataclass(frozen=True, kw_only=True)
    class Probe(Method):
        name = "_probe"
        rate: float = knob(0.5, above=0.0, maximum=1.0)

    assert Probe(rate=1).rate == 1.0
    assert isinstance(Probe(rate=1).rate, float)
    for wrong in (0, 1.5, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="_probe: rate="):
            Probe(rate=wrong)
    assert "_probe" not in sparing.list_methods()


def test_split_specs():
    assert split_specs("exact, nystrom(landmarks=8, solver=exact) ,yoso") == [
        "exact", "nystrom(landmarks=8, solver=exact)", "yoso",
    ]  # fmt: skip
    assert split_specs("") == []


def test_a_name_is_taken_once():
    with pytest.raises(ValueError, match="'exact' exists already"):

        class Other(Method):
            name = "exact"


def test_a_method_of_the_user_goes_through_the_door():
    @dataclass(frozen=True, kw_only=True)
    class Mean(Method):
        """The mean of the visible values."""

        name = "_mean"

        def reference(self, q, k, v, call):
            weights = torch.ones(()) if call.mask.keep is None else call.mask.keep[:, None, :, None]
            total = (weights * torch.ones_like(v[..., :1])).sum(-2, keepdim=True).clamp_min(1)
            return ((weights * v).sum(-2, keepdim=True) / total).expand(*q.shape[:-1], v.shape[-1])

    q, k, v = torch.randn(3, 2, 2, 9, 4).unbind(0)
    keep = torch.rand(2, 1, 1, 9) < 0.5
    keep[..., 0] = True
    out = sparing.attention(q, k, v.masked_fill(~keep.mT, torch.nan), keep, method=Mean())
    assert out.isfinite().all()
    with pytest.raises(sparing.Unsupported, match="_mean does not support is_causal"):
        sparing.attention(q, k, v, is_causal=True, method=Mean())


def test_pairs_of_a_causal_shape():
    for n_q, n_k in ((5, 5), (3, 7), (7, 3)):
        shape = Shape(queries=n_q, keys=n_k, head_dim=1, value_dim=1, causal=True)
        assert shape.pairs == int(torch.ones(n_q, n_k).tril().sum())
