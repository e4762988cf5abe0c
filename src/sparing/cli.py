"""The `sparing` command."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and run one sub-command; errors of the user print one line and give status 2."""
    parser = argparse.ArgumentParser(
        prog="sparing", description="Approximate attention, measured on your model, your documents, your machine."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    _add_compare(commands)
    _add_bench(commands)
    _add_lists(commands)
    options = parser.parse_args(arguments)
    run = {"compare": _compare, "bench": _bench, "methods": _methods, "show": _show, "report": _report}
    try:
        return run[options.command](options)
    except (ValueError, TypeError, ModuleNotFoundError, OSError) as error:
        if getattr(options, "debug", False):
            raise
        sys.stderr.write(f"sparing {options.command}: {error}\n")
        return 2
    except KeyboardInterrupt:
        if options.command != "compare":
            raise
        kept = "" if options.no_cache else "; what was measured is kept, the same command goes on"
        sys.stderr.write(f"sparing compare: stopped{kept}\n")
        return 130


def _add_compare(commands: Any) -> None:
    parser = commands.add_parser(
        "compare", help="every method in your model, on your documents: how wrong, how fast, is it safe?"
    )
    parser.add_argument(
        "model", nargs="?", default="minilm",
        help="a folder, a name on the hub, or a preset: minilm (default) or smollm2",
    )  # fmt: skip
    parser.add_argument(
        "--data", nargs="+", metavar="FILE",
        help="plain text with one document per line, .jsonl, .csv, .tsv, .parquet, or - for standard input; default: "
        "Python's help topics",
    )  # fmt: skip
    parser.add_argument("--column", help="of the text, in tables (default: text)")
    parser.add_argument("--whole", action="store_true", help="a plain text file is one document")
    parser.add_argument(
        "--methods",
        help="comma-separated specs, such as 'window(size=64),nystrom'; default: every training-free method",
    )
    parser.add_argument("--length", type=int, help="tokens per document at most; default: 512, language models 1024")
    parser.add_argument("--documents", type=int, help="how many, the first ones (default: 8)")
    parser.add_argument("--seeds", type=int, default=2, help="of methods that draw random numbers (default: 2)")
    parser.add_argument(
        "--tolerance", type=float, default=0.01, help="of the change at the end of the model (default: 0.01)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="of the timings (default: 5)")
    parser.add_argument("--jobs", type=int, help="processes that measure errors; default: one for each core")
    parser.add_argument("--layers", action="store_true", help="errors layer by layer too, and how good error bars are")
    parser.add_argument("--json", metavar="FILE", help="write everything there")
    parser.add_argument(
        "--cache", metavar="FOLDER", help="where results are kept; default: sparing in the user's cache"
    )
    parser.add_argument("--no-cache", action="store_true", help="measure everything anew, and keep nothing")
    parser.add_argument("--debug", action="store_true", help="show where an error came from")


def _compare(options: argparse.Namespace) -> int:
    os.environ.setdefault("TQDM_DISABLE", "1")  # one progress bar is enough, and processes inherit this
    try:
        from rich.console import Console
        from rich.progress import Progress, TimeElapsedColumn, TimeRemainingColumn
        from transformers.utils import logging
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{error.name} is missing; run: pip install 'sparing[cli]'") from None
    from sparing.measure.cells import write_whole
    from sparing.measure.compare import compare
    from sparing.report.table import show
    from sparing.spec import split_specs
    from sparing.tasks import documents

    specs = None if options.methods is None else split_specs(options.methods)
    texts = documents.read(options.data, column=options.column, whole=options.whole) if options.data else None
    target = None if options.json is None else Path(options.json)
    if target is not None and not target.absolute().parent.is_dir():
        raise ValueError(f"--json={options.json}: there is no folder {target.absolute().parent}")
    if target is not None and (target.is_dir() or not os.access(target.absolute().parent, os.W_OK)):
        raise ValueError(f"--json={options.json} cannot be written")
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    console = Console(stderr=True)
    columns = (*Progress.get_default_columns()[:3], TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("loading the model", total=None)
        found = compare(
            options.model, texts, methods=specs, length=options.length, documents=options.documents,
            seeds=options.seeds, tolerance=options.tolerance, rounds=options.rounds, jobs=options.jobs,
            cache=None if options.no_cache else options.cache or _cache_folder(),
            progress=lambda text, done, steps: bar.update(task, description=text, completed=done, total=steps),
        )  # fmt: skip
    show(found, layers=options.layers, console=_console())
    if target is not None:
        write_whole(target, found.to_json())
        console.print(f"wrote {target}", markup=False, soft_wrap=True)
    return 0


def _add_lists(commands: Any) -> None:
    commands.add_parser("methods", help="what each method is, and what it can do")
    show = commands.add_parser("show", help="what a recipe says about the layers of a model")
    show.add_argument("recipe", help="a JSON file, as sparing.Recipe saves it")
    report = commands.add_parser("report", help="a comparison that compare --json wrote, once more")
    report.add_argument("result", help="the JSON file")
    report.add_argument("--layers", action="store_true", help="errors layer by layer too")


def _methods(options: argparse.Namespace) -> int:
    console = _console()
    from sparing.report.lists import methods_table

    console.print(methods_table())
    return 0


def _show(options: argparse.Namespace) -> int:
    console = _console()
    from sparing.report.lists import recipe_table
    from sparing.transformers import Recipe

    recipe = Recipe.load(options.recipe)
    console.print(recipe_table(recipe))
    for name, value in recipe.about.items():
        console.print(f"{name}: {value}", markup=False, highlight=False)
    return 0


def _report(options: argparse.Namespace) -> int:
    console = _console()
    from sparing.measure.verdict import Comparison
    from sparing.report.table import show

    try:
        found = Comparison.from_json(Path(options.result).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"there is no file {options.result}") from None
    except ValueError as error:
        raise ValueError(f"{options.result}: {error}") from None
    show(found, layers=options.layers, console=console)
    return 0


def _console() -> Any:
    """At least 100 columns wide: a number that is cut off is worse than a line that wraps."""
    try:
        from rich.console import Console
    except ModuleNotFoundError:
        raise ModuleNotFoundError("rich is missing; run: pip install 'sparing[cli]'") from None
    return Console(width=max(100, Console().width))


def _cache_folder() -> Path:
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "sparing" / "compare"


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
