"""Write and read a benchmark as JSON, and draw it."""

from __future__ import annotations

import io
import json
from pathlib import Path

from sparing.from_json import parse
from sparing.report.bench import sides
from sparing.store import add_checksum, write_files
from sparing.workbench.benchmark.results import SDPA, SDPA_BF16, SDPA_PROJECTION, Bench


def write(bench: Bench, result: Path, picture: Path) -> tuple[list[Path], str]:
    """Write the figures and a plot, all or none; return the files, and why there is no plot, or ""."""
    contents: dict[Path, str | bytes] = {result: to_json(bench)}
    why = ""
    try:
        contents[picture] = plot(bench, picture.suffix.lstrip("."))
    except ModuleNotFoundError as error:
        why = str(error)
    for path in contents:
        path.parent.mkdir(parents=True, exist_ok=True)
    write_files(contents)
    return list(contents), why


def to_json(bench: Bench) -> str:
    """Return all figures, with settings and machine; `read_json` gives back an equal object."""
    return json.dumps(add_checksum(bench.as_dict()), indent=1, allow_nan=False) + "\n"


def read_json(path: Path) -> Bench:
    """Return the run that a file holds."""
    try:
        return Bench.from_dict(parse(path.read_bytes().decode()))
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: {error}") from None


def plot(bench: Bench, form: str) -> bytes:
    """Return time over length, both logarithmic, one panel for each pass, as "png" or "svg"; needs matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "matplotlib is missing; run: pip install 'sparing[bench]'", name="matplotlib"
        ) from None
    figure = Figure(figsize=(6 * len(bench.settings.passes) + 3, 6), layout="constrained")
    styles = {SDPA: ("black", "-"), SDPA_BF16: ("black", "-."), SDPA_PROJECTION: ("black", ":")}
    colours = {spec: f"C{i % 10}" for i, spec in enumerate(bench.settings.methods)}
    for number, part in enumerate(bench.settings.passes):
        axes = figure.add_subplot(1, len(bench.settings.passes), number + 1)
        for side in sides(bench):
            points = [t for t in bench.timings if (t.side, t.part) == (side, part) and t.seconds is not None]
            if not points:
                continue
            colour, line = styles.get(side, (colours.get(side.split(" for ")[-1], "black"), "-"))
            line = "--" if side not in styles and side not in colours else line
            points.sort(key=lambda t: t.length)
            times = [t.seconds for t in points if t.seconds is not None]
            lengths = [t.length for t in points]
            axes.plot(lengths, [t.median for t in times], line, color=colour, marker="o", markersize=3, label=side)
            axes.fill_between(lengths, [t.low for t in times], [t.high for t in times], color=colour, alpha=0.15)
        axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel="seconds of a call", title=part)
        axes.set_xticks(bench.settings.lengths, [str(n) for n in bench.settings.lengths], rotation=45)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    shown = {label: line for axes in figure.axes for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(shown.values(), shown.keys(), loc="outside right upper", fontsize=7)
    s, m = bench.settings, bench.machine
    figure.suptitle(
        f"batch {s.batch}, {s.heads} heads x {s.width}, {s.threads} threads, {m.get('cpu')}",
        x=0.01,
        ha="left",
        fontsize=9,
    )
    drawn = io.BytesIO()
    figure.savefig(drawn, format=form, dpi=120)
    return drawn.getvalue()
