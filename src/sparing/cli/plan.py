"""`sparing plan`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from sparing.cli.files import writes
from sparing.cli.options import add_subject, cache_of, console_of, documents_of, needs_cli, progress_bar


def add(commands: Any) -> None:
    """Declare the options."""
    parser = commands.add_parser(
        "plan", help="choose what each layer runs within a tolerance, checked on held-out documents: a recipe"
    )
    parser.set_defaults(run=run)
    add_subject(parser)
    parser.add_argument(
        "--tolerance", type=float, default=0.01, help="of a document's change at the end of the model (default: 0.01)"
    )
    parser.add_argument(
        "--metric", help="of that change: perplexity or agreement, probability or agreement, cosine; default: the first"
    )
    parser.add_argument("--coverage", type=float, default=0.9, help="share of documents within it (default: 0.9)")
    parser.add_argument("--confidence", type=float, default=0.95, help="of that promise (default: 0.95)")
    parser.add_argument("--objective", default="time", help="what to save: time or memory (default: time)")
    parser.add_argument("--documents", type=int, help="how many, drawn at random (default: 70)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw, the split and random methods (default: 0)")
    parser.add_argument("--rounds", type=int, default=7, help="of the timings of the model (default: 7)")
    parser.add_argument("--jobs", type=int, help="processes that run documents; default: one for each core")
    writes(parser, "-o", "--output", default="recipe.json", metavar="FILE", help="(default: recipe.json)")


def run(options: argparse.Namespace) -> int:
    """Plan, print, write."""
    with needs_cli():
        from sparing.report.plan import show
    from sparing.spec import split_specs
    from sparing.workbench.planning.plan import plan

    specs = None if options.methods is None else split_specs(options.methods)
    if not options.output.endswith(".json"):
        raise ValueError(
            f"--output={options.output}: a recipe is a .json file; approximate() takes other names for methods"
        )
    target = Path(options.output)
    texts = documents_of(options)
    with progress_bar() as progress:
        found = plan(
            options.model, texts, tolerance=options.tolerance, metric=options.metric, objective=options.objective,
            coverage=options.coverage, confidence=options.confidence, methods=specs, length=options.length,
            documents=options.documents, extend_positions=options.extend_positions, seed=options.seed,
            rounds=options.rounds, jobs=options.jobs, cache=cache_of(options), progress=progress,
        )  # fmt: skip
    console = console_of()
    try:
        found.recipe.save(target)
    finally:  # a full disk is no reason to hide what was found
        show(found, console=console)
    text = f'turn it on: sparing.approximate(model, "{target}")' if found.holds else "it leaves every layer exact"
    console.print(f"wrote {target}; {text}", soft_wrap=True)
    return 0
