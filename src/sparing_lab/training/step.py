"""Seconds of a training step with a method, against exact attention: `python -m sparing_lab.training.step`.

A step is what `sparing train` does: forward and backward through a masked language model, and the optimizer. All sides
run in turn, in one process, with the same weights and batches.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from sparing.spec import split_specs
from sparing.workbench.timing import Interval, interval, race
from sparing_lab.training.config import Config
from sparing_lab.training.loop import Training

METHODS = "yoso(hashes=16),yoso(hashes=32),yoso(hashes=64)"


def step_ratios(
    methods: Sequence[str], length: int, *, rounds: int = 5, batch: int = 1, width: int = 256, layers: int = 2
) -> tuple[Interval, list[Interval]]:
    """Seconds of an exact step, and for each method those seconds / its own: above 1 the method is faster."""
    runs = [
        Training(
            Config(
                "masked", method=spec, length=length, batch=batch, width=width, heads=max(width // 64, 1),
                layers=layers, hidden=4 * width, steps=1,
            )
        )
        for spec in ("exact", *methods)
    ]  # fmt: skip
    found = race([run.take_step for run in runs], [rounds + 1] * len(runs))
    exact, *others = (times[1:] for times in found)  # the first round warms up
    return interval(exact), [interval([a / b for a, b in zip(exact, times, strict=True)]) for times in others]


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the table to standard output, a row as soon as it is measured."""
    parser = argparse.ArgumentParser(prog="python -m sparing_lab.training.step", description=__doc__)
    parser.add_argument("--methods", default=METHODS, help=f"comma-separated specs (default: {METHODS})")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192], help="tokens")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--width", type=int, default=256, help="of the model, in heads of 64")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    specs = split_specs(options.methods)
    head = f"| tokens | exact step | {' | '.join(f'`{spec}`' for spec in specs)} |"
    sys.stdout.write(f"{head}\n|{'---|' * (head.count('|') - 1)}\n")
    for length in options.lengths:
        exact, ratios = step_ratios(
            specs, length, rounds=options.rounds, batch=options.batch, width=options.width, layers=options.layers
        )
        cells = (f"{each.median:.2f}x ({each.low:.2f} to {each.high:.2f})" for each in ratios)
        sys.stdout.write(f"| {length} | {exact.median:.3f} s | {' | '.join(cells)} |\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
