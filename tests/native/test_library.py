"""Loading the kernels, saying what was loaded, and doing without."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch.autograd import forward_ad

import sparing
from sparing import native
from sparing.methods.window.method import Window
from sparing.native import library
from tests.support.kernel_checks import needs_kernels


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


def stub(folder, *functions):
    """A library with these functions, that say "0.0.1" or what they are given."""
    source = folder / "stub.c"
    source.write_text("\n".join(f'const char* {name}(void) {{ return "{says}"; }}' for name, says in functions))
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", folder / "stub.so", source], check=True)
    return folder / "stub.so"


OURS = (("sparing_isa", "portable"), ("sparing_use_isa", ""))


def library_that_is_not_ours(kind, folder):
    if kind == "missing":
        return folder / "none.so"
    if kind == "a folder":
        return folder
    if kind == "text":
        (folder / "text.so").write_text("no library")
        return folder / "text.so"
    if kind == "another library":
        return Path(torch.__file__).parent / "lib" / "libc10.so"
    return stub(folder, *OURS, *([] if kind == "no version" else [("sparing_version", "0.0.1")]))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("missing", "none.so cannot be loaded: .*No such file"),
        ("a folder", "cannot be loaded: .*(cannot read file data|[Dd]irectory)"),
        ("text", "text.so cannot be loaded: .*(invalid ELF header|file too short)"),
        ("another library", "libc10.so is not a build of this version's kernels: .*sparing_version"),
        ("no version", "stub.so is not a build of this version's kernels: .*sparing_version"),
        ("old version", f"stub.so was built for sparing 0.0.1, and this is {sparing.__version__}: build it again"),
    ],
)
def test_a_library_that_is_not_ours_is_refused_with_the_reason(kind, message, tmp_path, monkeypatch):
    monkeypatch.setenv("SPARING_NATIVE_LIBRARY", str(library_that_is_not_ours(kind, tmp_path)))
    found, path, reason = library._load()
    assert found is path is None
    assert re.search(message, reason)
    assert "\n" not in reason


def test_with_a_library_that_is_not_ours_everything_works_and_native_says_why():
    other = str(Path(torch.__file__).parent / "lib" / "libc10.so")
    insist = (
        "\ntry: sparing.attention(q, q, q, method='window', impl='native')\nexcept ValueError as error: print(error)"
    )
    out, _ = fresh(ATTEND + WINDOW + "; print(sparing.native.info().reason)" + insist, SPARING_NATIVE_LIBRARY=other)
    works, reason, refusal = out.splitlines()
    assert works == "36.0"
    assert f"{other} is not a build of this version's kernels" in reason
    assert reason in refusal


@needs_kernels
def test_a_library_without_an_op_is_not_used(monkeypatch):
    assert not [op for op in library.schemas.declared if not library._has_kernel(op)]
    for name in ("_library", "_path", "_reason"):
        monkeypatch.setattr(library, name, getattr(library, name))  # to be given back
    monkeypatch.setattr(library, "_checked", False)
    monkeypatch.setattr(library.schemas, "declared", list(library.schemas.declared))
    library.schemas.define("of_tomorrow(Tensor x) -> Tensor")
    found = native.info()
    assert not found.loaded
    assert found.reason.endswith(".so has no op sparing::of_tomorrow: build it again")
    q = torch.randn(1, 1, 8, 4)
    assert not native.ready(q)
    assert "of_tomorrow" in native.why_not(q)


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
