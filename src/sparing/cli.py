"""The `sparing` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and run one sub-command; errors of the user print one line and give status 2."""
    parser = argparse.ArgumentParser(prog="sparing", description="Approximate attention, measured on real layers.")
    commands = parser.add_subparsers(dest="command", required=True)
    compare = commands.add_parser(
        "compare", help="every method on the real layers of the MiniLM encoder: error, FLOPs, time, capabilities"
    )
    compare.add_argument("--methods", help="comma-separated specs, such as 'exact,nystrom(landmarks=32)'; default: all")
    compare.add_argument("--length", type=int, default=512, help="tokens per document, at most 512 (default: 512)")
    compare.add_argument("--documents", type=int, default=2, help="documents to average over (default: 2)")
    compare.add_argument(
        "--layers", action="store_true", help="errors layer by layer too, and how well error bars rank them"
    )
    _add_bench(commands)
    options = parser.parse_args(arguments)
    try:
        return _bench(options) if options.command == "bench" else _compare(options)
    except (ValueError, TypeError, ModuleNotFoundError, OSError) as error:
        sys.stderr.write(f"sparing {options.command}: {error}\n")
        return 2


def _compare(options: argparse.Namespace) -> int:
    from sparing.measure.compare import BUDGETS, compare
    from sparing.method import method
    from sparing.spec import split_specs

    specs = split_specs(options.methods) if options.methods else BUDGETS
    chosen = [method(spec) for spec in specs]
    if not chosen:
        raise ValueError(f"--methods={options.methods!r} names no method")
    if not 2 <= options.length <= 512:
        raise ValueError(f"--length={options.length} must be from 2 to 512, the positions of the model")
    if options.documents < 1:
        raise ValueError(f"--documents={options.documents} must be at least 1")
    try:
        from rich.console import Console
        from transformers.utils import logging
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{error.name} is missing; run: pip install 'sparing[cli]'") from None
    from sparing.measure.capture import capture
    from sparing.report.table import show
    from sparing.tasks import minilm

    logging.disable_progress_bar()
    with Console(stderr=True).status("loading MiniLM") as status:
        encoder = minilm.load()
        ids = minilm.token_ids(encoder, length=options.length, documents=options.documents)
        layers = capture(encoder.model, input_ids=ids)
        rows = compare(layers, chosen, progress=status.update)
    size = f"{len(layers)} layers, {options.documents} documents of {options.length} tokens"
    show(rows, title=f"MiniLM, {size} (Python help topics)", layers=options.layers)
    return 0


def _add_bench(commands: Any) -> None:
    parser = commands.add_parser(
        "bench", help="time and memory of every method over the length, against SDPA and public implementations"
    )
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
    parser.add_argument("--out", default="out", help="folder for bench.json and bench.png (default: out)")


def _bench(options: argparse.Namespace) -> int:
    import torch

    from sparing.measure.bench import METHODS, bench
    from sparing.measure.results import Settings
    from sparing.spec import split_specs

    try:
        from rich.console import Console
        from rich.progress import Progress, TimeElapsedColumn
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{error.name} is missing; run: pip install 'sparing[bench]'") from None
    from sparing.report.bench import show
    from sparing.report.bench_files import check_folder, write_json, write_plot

    settings = Settings(
        methods=METHODS if options.methods is None else tuple(split_specs(options.methods)),
        heads=options.heads, width=options.width, batch=options.batch, seconds=options.seconds,
        threads=torch.get_num_threads() if options.threads is None else options.threads,
        backward=options.backward, peers=options.peers,
        **({"lengths": _numbers(options.lengths)} if options.lengths else {}),
    )  # fmt: skip
    folder = Path(options.out)
    check_folder(folder)
    console = Console(stderr=True)
    with Progress(*Progress.get_default_columns()[:3], TimeElapsedColumn(), console=console, transient=True) as bar:
        task = bar.add_task("starting")
        result = bench(
            settings, progress=lambda text, done, steps: bar.update(task, description=text, completed=done, total=steps)
        )
    show(result)
    write_json(result, folder / "bench.json")
    written = [folder / "bench.json"]
    try:
        write_plot(result, folder / "bench.png")
        written.append(folder / "bench.png")
    except ModuleNotFoundError as error:
        console.print(f"no plot: {error}", markup=False)
    console.print(f"wrote {', '.join(map(str, written))}", markup=False, soft_wrap=True)
    return 0


def _numbers(words: Sequence[str]) -> tuple[int, ...]:
    """The integers of words such as "512,1024" and "4096"."""
    parts = [part for word in words for part in word.split(",") if part]
    try:
        return tuple(int(part) for part in parts)
    except ValueError:
        raise ValueError(f"--lengths={' '.join(words)!r} must be whole numbers, such as 512 1024 4096") from None
