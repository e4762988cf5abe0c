"""Loading the kernels, saying what was loaded, and doing without."""

import os
import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch
from torch.autograd import forward_ad

import sparing
from sparing import native
from sparing.methods.window import Window

from kernel_tools import needs_kernels


def fresh(code, **environment):
    done = subprocess.run(
        [sys.executable, "-W", "always", "-c", code], env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


ATTEND = "import torch, sparing; q = torch.ones(1, 1, 9, 4); "
WINDOW = "print(sparing.attention(q, q, q, method='window(size=2)').sum().item())"


@needs_kernels
def test_info_tells_what_runs():
    found = native.info()
    assert found.available[-1] == "portable"
    assert found.instruction_set in found.available
    for name in found.available:
        with native.instruction_set(name):
            assert native.info().instruction_set == name
    assert native.info() == found
    with pytest.raises(ValueError, match="'mmx' is not one of"), native.instruction_set("mmx"):
        pass


@needs_kernels
def test_native_is_used_and_can_be_insisted_on():
    q = torch.randn(1, 2, 20, 8)
    assert torch.equal(
        sparing.attention(q, q, q, method="window(size=4)", impl="native"),
        sparing.attention(q, q, q, method="window(size=4)"),
    )
    with native.switched_off():
        with pytest.raises(sparing.Unsupported, match=r"impl='native'.*use impl='auto'"):
            sparing.attention(q, q, q, method="window(size=4)", impl="native")
        assert sparing.attention(q, q, q, method="window(size=4)").shape == q.shape
    assert native.ready(q)


def test_without_a_library_everything_works_and_one_warning_tells():
    code = ATTEND + "import sparing.native as n; print(n.info().loaded); " + WINDOW + ";" + WINDOW
    out, err = fresh(code, SPARING_NATIVE_LIBRARY="/nowhere/kernels.so")
    assert out.split() == ["False", "36.0", "36.0"]
    assert err.count("sparing runs without its kernels") == 1
    assert "/nowhere/kernels.so" in err
    out, err = fresh(code, SPARING_NATIVE_LIBRARY="")  # asked for: no warning
    assert out.split() == ["False", "36.0", "36.0"]
    assert "kernels" not in err


@needs_kernels
def test_a_subclass_with_other_mathematics_does_not_inherit_the_kernel():
    @dataclass(frozen=True, kw_only=True)
    class Zero(Window):
        name = "_zero"

        def fast(self, q, k, v, call):
            return torch.zeros_like(v)

    q = torch.randn(1, 2, 20, 8)
    assert bool((sparing.attention(q, q, q, method=Zero(size=4)) == 0).all())
    with pytest.raises(sparing.Unsupported, match="impl='native'"):
        sparing.attention(q, q, q, method=Zero(size=4), impl="native")


@needs_kernels
def test_native_says_why_it_cannot():
    q = torch.randn(1, 1, 8, 4)
    with native.switched_off(), pytest.raises(sparing.Unsupported, match=r"window: .*switched_off\(\) is in force"):
        sparing.attention(q, q, q, method="window", impl="native")
    with forward_ad.dual_level(), pytest.raises(sparing.Unsupported, match="no forward-mode derivative"):
        sparing.attention(q, q, q, method="window", impl="native")
