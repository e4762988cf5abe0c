"""Every header of the kernels can be opened alone: it compiles, and it includes what declares the names that it uses."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "src" / "sparing" / "native" / "csrc"
HEADERS = {str(path.relative_to(CSRC)): path.read_text() for path in sorted(CSRC.rglob("*.h"))}

INCLUDE = re.compile(r'^#include "(.+)"', re.M)
TYPE = re.compile(r"^(?:struct|enum class|using|class) (\w+)", re.M)
CONSTANT = re.compile(r"^(?:inline )?constexpr [\w:]+ (\w+) =", re.M)
MACRO = re.compile(r"^#define (SPARING_\w+)", re.M)
# At the start of a line. A member that is defined outside of its class has the name of that before its own.
FUNCTION = re.compile(r"^(?!\s|#|return|namespace|struct|template)[\w:<>,&* ()]*?[\w>&*] \*?(\w+)\((?!\()", re.M)
LOCAL = re.compile(r"[\w>&*)\]] [&*]*(\w+)(?= = |\{|;|\)|,| : |\()")


def words(text: str) -> str:
    """Return a header without comments and strings."""
    return re.sub(r'//.*|"[^"\n]*"', "", text)


def declared(text: str) -> set[str]:
    """Return the names that a header declares for others."""
    text = words(text)
    return {name for pattern in (TYPE, CONSTANT, MACRO, FUNCTION) for name in pattern.findall(text)}


def called(text: str) -> set[str]:
    """Return the names that a header uses: types, constants and macros, and functions that it calls."""
    text = words(text)
    types = re.findall(r"(?<![\w.>:])(?:[A-Z]\w+|k[A-Z]\w*)\b", text)
    return {*types, *re.findall(r"(?<![\w.:>~])([a-z]\w*)(?:\(|<[\w ])", text)}


def reachable(header: str, headers: dict[str, str]) -> set[str]:
    """Return the header and all that it includes."""
    found, left = {header}, [header]
    while left:
        for name in INCLUDE.findall(headers[left.pop()]):
            if name not in found:
                found.add(name)
                left.append(name)
    return found


def missing(headers: dict[str, str]) -> list[str]:
    """Return the names that some header uses and neither declares nor includes.

    The compiler alone does not find them: what a template calls is looked up when somebody instantiates it.
    """
    names = {header: declared(text) for header, text in headers.items()}
    found = []
    for header, text in headers.items():
        near = reachable(header, headers)
        there = set().union(*(names[name] for name in near))
        # Members, parameters and local variables may have the name of somebody's function.
        local = set().union(*(LOCAL.findall(words(headers[name])) for name in near))
        for name in sorted(called(text) - there - local):
            homes = [home for home, all_names in names.items() if name in all_names]
            found += [f"{header} uses {name} of {' or '.join(homes)}"] if homes else []
    return found


def test_every_header_includes_what_it_uses():
    assert missing(HEADERS) == []


@pytest.mark.parametrize(
    ("header", "include"),
    [("attend/attend.h", "attend/few_keys.h"), ("lsh/strip.h", "common/tile.h"), ("window/window.h", "window/call.h")],
)
def test_a_forgotten_include_is_seen(header, include):
    """Control: the same check rejects a header that lacks an include."""
    without = HEADERS[header].replace(f'#include "{include}"\n', "")
    assert without != HEADERS[header]
    assert any(line.startswith(f"{header} uses") for line in missing({**HEADERS, header: without}))


def test_every_header_has_a_guard():
    assert [name for name, text in HEADERS.items() if text.count("#pragma once\n") != 1] == []


def compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "c++").split()[0])


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler on this machine")
@pytest.mark.parametrize("pattern", [pytest.param("**/*.h", marks=pytest.mark.slow), "common/simd.h"])
def test_headers_compile_alone(pattern):
    """For every instruction set, by the flags of the build."""
    subprocess.run([sys.executable, "setup.py", "-q", "check_headers", f"--pattern={pattern}"], cwd=ROOT, check=True)


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler on this machine")
def test_a_header_that_does_not_compile_is_an_error(tmp_path):
    """Control: the same command rejects a header that needs another one before it."""
    shutil.copytree(CSRC / "common", tmp_path / "common")
    alone = tmp_path / "common" / "rows.h"
    alone.write_text(INCLUDE.sub("", alone.read_text()))
    command = [sys.executable, "setup.py", "-q", "check_headers", f"--csrc={tmp_path}", "--pattern=common/rows.h"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode != 0
    assert "rows.h" in done.stderr
