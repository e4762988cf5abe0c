"""`sparing plan`."""

from __future__ import annotations

import argparse
from typing import Any

from sparing.commands.shared import cache_of, console_of, documents_of, needs_cli, progress_bar, targets_of


def add(commands: Any) -> None:
    """Declare the options."""
    parser = commands.add_parser(
        "plan", help="choose what each layer runs within a tolerance, checked on held-out documents: a recipe"
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
        "--tolerance", type=float, default=0.01, help="of a document's change at the end of the model (default: 0.01)"
    )
    parser.add_argument(
        "--metric", help="of that change: perplexity or agreement, probability or agreement, cosine; default: the first"
    )
    parser.add_argument("--coverage", type=float, default=0.9, help="share of documents within it (default: 0.9)")
    parser.add_argument("--confidence", type=float, default=0.95, help="of that promise (default: 0.95)")
    parser.add_argument("--objective", default="time", help="what to save: time or memory (default: time)")
    parser.add_argument(
        "--methods",
        help="comma-separated specs, such as 'window(size=64),nystrom'; default: every training-free method",
    )
    parser.add_argument("--length", type=int, help="tokens per document at most; default: 512, language models 1024")
    parser.add_argument(
        "--extend-positions", action="store_true", help="repeat learned positions where --length is more than they are"
    )
    parser.add_argument("--documents", type=int, help="how many, drawn at random (default: 70)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw, the split and random methods (default: 0)")
    parser.add_argument("--rounds", type=int, default=7, help="of the timings of the model (default: 7)")
    parser.add_argument("--jobs", type=int, help="processes that run documents; default: one for each core")
    parser.add_argument("-o", "--output", default="recipe.json", metavar="FILE", help="(default: recipe.json)")
    parser.add_argument(
        "--cache", metavar="FOLDER", help="where results are kept; default: sparing in the user's cache"
    )
    parser.add_argument("--no-cache", action="store_true", help="measure everything anew, and keep nothing")


def run(options: argparse.Namespace) -> int:
    """Plan, print, write."""
    with needs_cli():
        from sparing.report.plan import show
    from sparing.planning.plan import plan
    from sparing.spec import split_specs

    specs = None if options.methods is None else split_specs(options.methods)
    if not options.output.endswith(".json"):
        raise ValueError(
            f"--output={options.output}: a recipe is a .json file; approximate() takes other names for methods"
        )
    target = targets_of(options, ("output",))["output"]
    texts = documents_of(options)
    with progress_bar() as progress:
        found = plan(
            options.model, texts, tolerance=options.tolerance, metric=options.metric, objective=options.objective,
            coverage=options.coverage, confidence=options.confidence, methods=specs, length=options.length,
            documents=options.documents, extend_positions=options.extend_positions, seed=options.seed,
            rounds=options.rounds, jobs=options.jobs, cache=cache_of(options), progress=progress,
        )  # fmt: skip
    console = console_of()
    show(found, console=console)
    found.recipe.save(target.resolve())
    text = f'turn it on: sparing.approximate(model, "{target}")' if found.holds else "it leaves every layer exact"
    console.print(f"wrote {target}; {text}", markup=False, highlight=False, soft_wrap=True)
    return 0
