"""`sparing bench`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sparing.cli.files import writes

_FILES = ("bench.json", "bench.png")


def add(commands: Any) -> None:
    """Declare the options."""
    parser = commands.add_parser(
        "bench", help="time and memory of every method over the length, against SDPA and public implementations"
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "--methods", help="comma-separated specs, such as 'window(size=256),yoso'; default: those with targets"
    )
    parser.add_argument(
        "--lengths", nargs="+", metavar="N", help="tokens; default: the powers of two from 512 to 65536"
    )
    parser.add_argument("--heads", type=int, default=12, help="(default: 12)")
    parser.add_argument("--width", type=int, default=64, help="entries of a head (default: 64)")
    parser.add_argument("--batch", type=int, default=1, help="(default: 1)")
    parser.add_argument("--threads", type=int, help="default: those of torch, one per core")
    parser.add_argument(
        "--seconds", type=float, default=60.0,
        help="leave out what takes longer than this for two calls at one length (default: 60)",
    )  # fmt: skip
    parser.add_argument(
        "--backward", action=argparse.BooleanOptionalAction, default=True, help="time gradients too (default: yes)"
    )
    parser.add_argument(
        "--peers", action="store_true", help="race installed public implementations too: pip install 'sparing[peers]'"
    )
    writes(
        parser, "--out", default="out", names=lambda options: _FILES,
        help=f"folder for {' and '.join(_FILES)} (default: out)",
    )  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Race, print, write."""
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

    settings = BenchSettings(
        methods=METHODS if options.methods is None else tuple(split_specs(options.methods)),
        heads=options.heads, width=options.width, batch=options.batch, seconds=options.seconds,
        threads=torch.get_num_threads() if options.threads is None else options.threads,
        backward=options.backward, peers=options.peers,
        **({"lengths": _numbers(options.lengths)} if options.lengths else {}),
    )  # fmt: skip
    console = Terminal(stderr=True)
    with progress(console, "starting", TimeElapsedColumn()) as tell:
        result = bench(settings, progress=tell)
    try:
        written, why = write(result, *(Path(options.out) / name for name in _FILES))
    finally:  # a full disk is no reason to hide what was measured
        show(result)
    if why:
        console.print(f"no plot: {why}")
    console.print(f"wrote {', '.join(map(str, written))}", soft_wrap=True)
    return 0


def _numbers(words: Sequence[str]) -> tuple[int, ...]:
    """The integers of words such as "512,1024" and "4096"."""
    parts = [part for word in words for part in word.split(",") if part]
    try:
        return tuple(int(part) for part in parts)
    except ValueError:
        raise ValueError(f"--lengths={' '.join(words)!r} must be whole numbers, such as 512 1024 4096") from None
