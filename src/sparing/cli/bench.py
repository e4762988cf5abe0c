"""`sparing bench`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from sparing.cli.files import reads, writes
from sparing.cli.options import add_methods, add_quiet, console_of, documents_of, progress_bar, renamed

_FILES = ("bench.json", "bench.png")
_PADDED_FILES = ("padded.json",)


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
    parser.add_argument("--batch-size", type=int, metavar="N", help="batch size (default: 1; with --padded: 32)")
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
    padded = parser.add_argument_group("texts of mixed length in batches, through a whole encoder")
    reads(
        padded, "--padded", nargs="?", const="minilm", metavar="MODEL",
        help="race MODEL (default: minilm), padded and without padding; --methods run without padding",
    )  # fmt: skip
    reads(
        padded, "--data", nargs="+", metavar="FILE",
        help="texts, as for compare (default: random tokens, with lengths as those of film reviews)",
    )  # fmt: skip
    padded.add_argument("--column", metavar="NAME", help="column of a table that holds the text (default: text)")
    padded.add_argument("--documents", type=int, metavar="N", help="use the first N texts (default: 256)")
    padded.add_argument("--length", type=int, metavar="N", help="cut texts to N tokens (default: as the model does)")
    padded.add_argument("--rounds", type=int, metavar="N", help="number of timed rounds (default: 3)")
    add_quiet(parser)
    writes(
        parser, "--out", default="out", metavar="FOLDER",
        names=lambda options: _FILES if options.padded is None else _PADDED_FILES,
        help=f"write {' and '.join(_FILES)}, or {_PADDED_FILES[0]}, to FOLDER (default: out)",
    )  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Measure, print and write."""
    if options.padded is not None:
        return _run_padded(options)
    for name in ("data", "column", "documents", "length", "rounds"):
        if getattr(options, name) is not None:
            raise ValueError(f"--{name} is for texts in batches: name a model with --padded")
    if options.batch_size is None:
        options.batch_size = 1
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


def _run_padded(options: argparse.Namespace) -> int:
    """Race an encoder on batches of mixed length, print and write."""
    from sparing.models import load
    from sparing.report.padded import show
    from sparing.spec import split_specs
    from sparing.store import add_checksum, write_files
    from sparing.workbench.benchmark.padded import drawn_rows, padded_bench
    from sparing.workbench.timing import threads

    if options.lengths is not None:
        raise ValueError("--lengths is for attention calls; with --padded, texts have the lengths of --data")
    count = 256 if options.documents is None else options.documents
    if count < 1:
        raise ValueError(f"--documents={count} must be at least 1")
    with progress_bar(quiet=options.quiet) as tell:
        subject = load(options.padded)
        most = options.length or min(subject.sentence_length or 512, subject.positions or 512)
        if subject.positions is not None and not 2 <= most <= subject.positions:
            raise ValueError(f"--length={most} must be from 2 to {subject.positions}, the positions of the model")
        if options.data:
            texts = documents_of(options)
            assert texts is not None
            rows, data = subject.encode(texts.texts[:count], most)[0], texts.name
        else:
            rows, data = drawn_rows(subject, count, most), "random tokens"
        with threads(options.threads) if options.threads else nullcontext():
            found = padded_bench(
                subject, rows, data, methods=split_specs(options.methods or ""), rounds=options.rounds or 3,
                batch_size=32 if options.batch_size is None else options.batch_size, progress=tell,
            )  # fmt: skip
    target = Path(options.out) / _PADDED_FILES[0]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_files({target: json.dumps(add_checksum(found.as_dict()), indent=1, allow_nan=False) + "\n"})
    finally:  # a full disk is no reason to hide what was measured
        show(found, console=console_of())
    if not options.quiet:
        console_of(stderr=True).print(f"wrote {target}", soft_wrap=True)
    return 0


def _numbers(words: Sequence[str]) -> tuple[int, ...]:
    """Return the integers of words such as "512,1024" and "4096"."""
    parts = [part for word in words for part in word.split(",") if part]
    try:
        return tuple(int(part) for part in parts)
    except ValueError:
        raise ValueError(f"--lengths={' '.join(words)!r} must be integers, such as 512 1024 4096") from None
