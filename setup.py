"""Builds the kernels where a compiler and torch are found; without them the package works through plain PyTorch."""

import os
import platform
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

CSRC = Path("src/sparing/native/csrc")
VERSION = re.search(r'__version__ = "(.+)"', Path("src/sparing/version.py").read_text())[1]


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
        import torch

        home = Path(torch.__file__).parent
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


setup(
    ext_modules=[]
    if os.environ.get("SPARING_SKIP_KERNELS")
    else [
        Extension(
            "sparing.native._kernels",
            # The long ones first: all kernels, once for each instruction set.
            sorted((str(p) for p in CSRC.glob("*.cpp")), key=lambda path: (path.endswith("_ops.cpp"), path)),
            depends=["src/sparing/version.py", *sorted(str(p) for p in CSRC.glob("*.h"))],
            extra_compile_args=[
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
            ],
            extra_link_args=os.environ.get("SPARING_CXXFLAGS", "").split(),
            py_limited_api=True,
        )
    ],
    cmdclass={"build_ext": BuildKernels},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
