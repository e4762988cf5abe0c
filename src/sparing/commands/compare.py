"""`sparing compare`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from sparing.commands.shared import cache_folder, console_of


def add(commands: Any) -> None:
    """Declare the options."""
    parser = commands.add_parser(
        "compare", help="every method in your model, on your documents: how wrong, how fast, is it safe?"
    )
    parser.set_defaults(run=run)
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


def run(options: argparse.Namespace) -> int:
    """Compare, print, write."""
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
            cache=None if options.no_cache else options.cache or cache_folder(),
            progress=lambda text, done, steps: bar.update(task, description=text, completed=done, total=steps),
        )  # fmt: skip
    show(found, layers=options.layers, console=console_of())
    if target is not None:
        write_whole(target, found.to_json())
        console.print(f"wrote {target}", markup=False, soft_wrap=True)
    return 0
