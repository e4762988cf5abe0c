"""Draw a benchmark: the speed-up against exact attention over the length; needs matplotlib."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sparing.report.numbers import short_names
from sparing.workbench.benchmark.results import SDPA, SDPA_BF16, Bench, Pass, baseline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TICKS = [part * 10.0**power for power in range(-3, 5) for part in (1, 2, 5)]
_GAP = 0.034  # between two names, as a share of the height
_MISSING = "matplotlib is missing; run: pip install 'sparing[bench]'"


def plot(bench: Bench, form: str) -> bytes:
    """Return the picture, as "png" or "svg"."""
    drawn = io.BytesIO()
    figure(bench).savefig(drawn, format=form, dpi=120)
    return drawn.getvalue()


def figure(bench: Bench) -> Figure:
    """Return a panel for each pass: time of exact attention / time of each method, above 1 is faster.

    Each line has its name at its end; bands are quartiles. Public implementations are dashed, in the method's colour.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ModuleNotFoundError(_MISSING, name="matplotlib") from None
    found = Figure(figsize=(7.5 * len(bench.settings.passes), 6), layout="constrained")
    for number, part in enumerate(bench.settings.passes):
        _panel(found.add_subplot(1, len(bench.settings.passes), number + 1), bench, part)
    s, m = bench.settings, bench.machine
    found.suptitle(
        f"Speed-up against exact attention (SDPA float32). Batch {s.batch}, {s.heads} heads x {s.width}, {s.dtype}, "
        f"{s.threads} threads, {m.get('cpu')}{'. BUSY MACHINE: trust no time' if bench.disturbed else ''}",
        x=0.01, ha="left", fontsize=10,
    )  # fmt: skip
    return found


def _panel(axes: Any, bench: Bench, part: Pass) -> None:
    lengths, short = bench.settings.lengths, short_names(bench.settings.methods)
    ends: list[tuple[float, float, str, str]] = []
    heights = [0.8, 1.25]
    for number, spec in enumerate(bench.settings.methods):
        mine = [r for n in lengths if (r := bench.ratio(spec, baseline(spec), n, part)) is not None]
        if not mine:
            continue
        colour, places = f"C{number % 10}", [r.length for r in mine]
        axes.plot(places, [r.speed.median for r in mine], "-o", color=colour, markersize=4)
        axes.fill_between(places, [r.speed.low for r in mine], [r.speed.high for r in mine], color=colour, alpha=0.15)
        ends.append((mine[-1].length, mine[-1].speed.median, short[spec], colour))
        heights += [end for r in mine for end in (r.speed.low, r.speed.high)]
        for peer in bench.peers:
            if peer.method == spec and (dashed := _by_medians(bench, f"{peer.peer} for {spec}", part)):
                axes.plot([n for n, _ in dashed], [speed for _, speed in dashed], "--", color=colour, linewidth=1)
                heights += [speed for _, speed in dashed]
    if rough := _by_medians(bench, SDPA_BF16, part):
        axes.plot([n for n, _ in rough], [speed for _, speed in rough], ":", color="0.4")
        ends.append((*rough[-1], "exact in bfloat16", "0.4"))
        heights += [speed for _, speed in rough]
    axes.axhline(1, color="black", linewidth=1.2)
    low, high = 0.9 * min(heights), 1.15 * max(heights)
    axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel="times as fast as exact attention", title=part)
    axes.set_ylim(low, high)
    axes.set_xlim(lengths[0] / 1.15, lengths[-1] * 1.15)
    axes.minorticks_off()
    axes.set_xticks(lengths, [tokens(n) for n in lengths])
    axes.set_yticks(ticks := [tick for tick in _TICKS if low <= tick <= high], [f"{tick:g}x" for tick in ticks])
    axes.grid(alpha=0.3)
    _name(axes, ends, low, high)


def _name(axes: Any, ends: Sequence[tuple[float, float, str, str]], low: float, high: float) -> None:
    """Write the names beside the ends of the lines, moved apart where they would meet."""
    span = math.log10(high / low)
    order = sorted(ends, key=lambda end: end[1])
    places = spread([math.log10(height / low) / span for _, height, _, _ in order], _GAP)
    for (length, height, name, colour), place in zip(order, places, strict=True):
        axes.annotate(
            name, (length, height), (1.02, place), textcoords="axes fraction", color=colour, fontsize=8, va="center",
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.5},
        )  # fmt: skip


def spread(places: Sequence[float], gap: float) -> list[float]:
    """Move sorted places apart, within 0 and 1 as far as they fit.

    >>> spread([0.5, 0.5, 1.0], 0.25)
    [0.5, 0.75, 1.0]
    """
    found = list(places)
    for i in range(1, len(found)):
        found[i] = max(found[i], found[i - 1] + gap)
    limit = 1.0
    for i in reversed(range(len(found))):
        found[i] = min(found[i], limit)
        limit = found[i] - gap
    return found


def tokens(count: int) -> str:
    """Format a length for an axis.

    >>> tokens(512), tokens(16384), tokens(3000)
    ('512', '16k', '3000')
    """
    return f"{count // 1024}k" if count >= 1024 and count % 1024 == 0 else str(count)


def _by_medians(bench: Bench, side: str, part: Pass) -> list[tuple[float, float]]:
    """Return length and speed against SDPA in float32, from medians: what no method was raced against has no ratio."""
    found = []
    for length in bench.settings.lengths:
        exact, other = (bench.timing(each, length, part) for each in (SDPA, side))
        if exact and other and exact.seconds and other.seconds and other.seconds.median > 0:
            found.append((float(length), exact.seconds.median / other.seconds.median))
    return found
