"""`sparing bench`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sparing.cli.files import writes
from sparing.cli.options import add_methods, add_quiet, console_of, renamed

_FILES = ("bench.json", "bench.png")


def add(commands: Any) -> None:
    """Declare the options."""
    parser = commands.add_parser(
        "bench", help="time attention calls of every method at growing lengths, against SDPA",
        description="Measure time and peak memory of attention calls at growing lengths, against PyTorch's SDPA and "
        "public implementations.",
    )  # fmt: skip
    parser.set_defaults(run=run)
    add_methods(parser, "those with a kernel that is meant to be fast")
    parser.add_argument(
        "--lengths", nargs="+", metavar="N", help="sequence lengths (default: powers of two from 512 to 65536)"
    )
    parser.add_argument("--heads", type=int, default=12, metavar="N", help="number of heads (default: 12)")
    parser.add_argument("--head-dim", type=int, default=64, metavar="N", help="dimension of a head (default: 64)")
    parser.add_argument("--batch-size", type=int, default=1, metavar="N", help="batch size (default: 1)")
    renamed(parser, "--width", new="--head-dim")
    renamed(parser, "--batch", new="--batch-size")
    parser.add_argument("--threads", type=int, metavar="N", help="number of threads (default: as torch chooses)")
    parser.add_argument(
        "--seconds", type=float, default=60.0, metavar="X",
        help="skip a method at lengths where two calls take longer than X seconds (default: 60)",
    )  # fmt: skip
    parser.add_argument(
        "--backward", action=argparse.BooleanOptionalAction, default=True,
        help="also time the backward pass (default: yes)",
    )  # fmt: skip
    parser.add_argument(
        "--peers", action="store_true",
        help="also time public implementations that are installed; pip install 'sparing[peers]' installs them",
    )  # fmt: skip
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), default="float32",
        help="type of the inputs of methods (default: float32); SDPA is timed in float32 and bfloat16",
    )  # fmt: skip
    parser.add_argument(
        "--targets", action="store_true", help="also print the speeds that developers aim at, and whether they are met"
    )
    add_quiet(parser)
    writes(
        parser, "--out", default="out", metavar="FOLDER", names=lambda options: _FILES,
        help=f"write {' and '.join(_FILES)} to FOLDER (default: out)",
    )  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Measure, print and write."""
    import torch

    from sparing.spec import split_specs
    from sparing.workbench.benchmark.bench import METHODS, bench
    from sparing.workbench.benchmark.results import BenchSettings

    try:
        from rich.progress import TimeElapsedColumn

        from sparing.report.terminal import Terminal, progress
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{error.name} is missing; run: pip install 'sparing[bench]'") from None
    from sparing.report.bench import show
    from sparing.report.bench_files import write

    for name in ("heads", "head_dim", "batch_size"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')}={getattr(options, name)} must be at least 1")
    settings = BenchSettings(
        methods=METHODS if options.methods is None else tuple(split_specs(options.methods)),
        heads=options.heads, width=options.head_dim, batch=options.batch_size, seconds=options.seconds,
        threads=torch.get_num_threads() if options.threads is None else options.threads,
        backward=options.backward, peers=options.peers, dtype=options.dtype,
        **({"lengths": _numbers(options.lengths)} if options.lengths else {}),
    )  # fmt: skip
    console = Terminal(stderr=True)
    with progress(console, "starting", TimeElapsedColumn(), quiet=options.quiet) as tell:
        result = bench(settings, progress=tell)
    try:
        written, why = write(result, *(Path(options.out) / name for name in _FILES))
    finally:  # a full disk is no reason to hide what was measured
        show(result, console=console_of(), targets=options.targets)
    if options.quiet:
        return 0
    if why:
        console.print(f"no plot: {why}")
    console.print(f"wrote {', '.join(map(str, written))}", soft_wrap=True)
    return 0


def _numbers(words: Sequence[str]) -> tuple[int, ...]:
    """Return the integers of words such as "512,1024" and "4096"."""
    parts = [part for word in words for part in word.split(",") if part]
    try:
        return tuple(int(part) for part in parts)
    except ValueError:
        raise ValueError(f"--lengths={' '.join(words)!r} must be integers, such as 512 1024 4096") from None
