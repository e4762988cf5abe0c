"""Builds the kernels where a compiler and torch are found; without them the package works through plain PyTorch."""

import os
import platform
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

from setuptools import Command, Extension, setup
from setuptools.command.build_ext import build_ext

CSRC = Path("src/sparing/native/csrc")
VERSION = re.search(r'__version__ = "(.+)"', Path("src/sparing/version.py").read_text())[1]
FLAGS = [
    "-std=c++20",
    "-O3",
    "-g0",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    "-Wno-psabi",  # vectors never cross a compiled boundary
    f'-DSPARING_VERSION="{VERSION}"',
    "-DTORCH_TARGET_VERSION=0x020a000000000000",
    *os.environ.get("SPARING_CXXFLAGS", "").split(),
]
BY_INSTRUCTION_SET = re.compile("SPARING_(AVX|SSE|BYTES|REGISTERS)")  # in headers that differ by it


def torch_home() -> Path:
    """Return the folder of torch, whose headers the ops include."""
    import torch

    return Path(torch.__file__).parent


class BuildKernels(build_ext):
    """build_ext that explains itself and goes on when the kernels cannot be built."""

    def build_extension(self, extension):
        """Compile one extension, or say why not."""
        try:
            self._add_torch(extension)
            self._compile_side_by_side()
            super().build_extension(extension)
        except Exception as error:
            if os.environ.get("SPARING_REQUIRE_KERNELS"):
                raise
            print(  # noqa: T201
                f"sparing: the kernels were not built ({type(error).__name__}: {error}); every method still works, "
                "through plain PyTorch. Install a C++20 compiler and torch, then "
                "`pip install --no-build-isolation .` to build them.",
                file=sys.stderr,
            )

    @staticmethod
    def _add_torch(extension):
        if platform.system() == "Windows":
            raise RuntimeError("they need GCC or Clang")
        home = torch_home()
        extension.include_dirs.append(str(CSRC))
        extension.extra_compile_args += ["-isystem", str(home / "include")]
        extension.library_dirs.append(str(home / "lib"))
        extension.libraries += ["torch", "torch_cpu", "c10"]

    def _compile_side_by_side(self):
        one_by_one = self.compiler.compile

        def compile_all(sources, **settings):
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                return [
                    o for found in pool.map(lambda source: one_by_one([source], **settings), sources) for o in found
                ]

        self.compiler.compile = compile_all

    def copy_extensions_to_source(self):
        """Leave out what was not built."""
        self.extensions = [e for e in self.extensions if Path(self.get_ext_fullpath(e.name)).exists() or self._built(e)]
        super().copy_extensions_to_source()

    def _built(self, extension):
        return Path(self.build_lib, self.get_ext_filename(extension.name)).exists()


class CheckHeaders(Command):
    """Compile every header of the kernels alone, as an editor sees it."""

    description = __doc__
    user_options: ClassVar = [
        ("csrc=", None, "folder that includes start from"),
        ("pattern=", None, "which headers of it [default: all]"),
    ]
    instruction_sets = (
        [],
        ["-DSPARING_FOR_AVX2", "-mavx2", "-mfma", "-mf16c"],
        ["-DSPARING_FOR_AVX512", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma"],
    )

    def initialize_options(self):
        """Set the defaults."""
        self.csrc, self.pattern = str(CSRC), "**/*.h"

    def finalize_options(self):
        """Nothing to complete."""

    def run(self):
        """Raise if a header does not compile, after the compiler has said why."""
        sets = self.instruction_sets if platform.machine() == "x86_64" else self.instruction_sets[:1]
        includes = ["-I", self.csrc, "-isystem", str(torch_home() / "include")]
        command = [*os.environ.get("CXX", "c++").split(), *FLAGS, *includes, "-Werror", "-fsyntax-only", "-x", "c++"]
        jobs = []
        for header in sorted(Path(self.csrc).glob(self.pattern)):
            # Most headers use the same names for every instruction set, so that compiling them once tells.
            differs = header.name == "all.h" or BY_INSTRUCTION_SET.search(header.read_text())
            for switches in sets if differs else sets[:1]:
                jobs.append([*command, *switches, "-include", str(header), os.devnull])
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            failed = [
                job[-2] for job, done in zip(jobs, pool.map(subprocess.run, jobs), strict=True) if done.returncode
            ]
        if failed:
            raise SystemExit(f"headers that do not compile alone: {', '.join(sorted(set(failed)))}")


setup(
    ext_modules=[]
    if os.environ.get("SPARING_SKIP_KERNELS")
    else [
        Extension(
            "sparing.native._kernels",
            # The long ones first: all kernels, once for each instruction set.
            sorted((str(p) for p in CSRC.rglob("*.cpp")), key=lambda path: (Path(path).parent != CSRC, path)),
            depends=["src/sparing/version.py", *sorted(str(p) for p in CSRC.rglob("*.h"))],
            extra_compile_args=list(FLAGS),
            extra_link_args=os.environ.get("SPARING_CXXFLAGS", "").split(),
            py_limited_api=True,
        )
    ],
    cmdclass={"build_ext": BuildKernels, "check_headers": CheckHeaders},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
