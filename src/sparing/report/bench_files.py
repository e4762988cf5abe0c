"""A benchmark as JSON and as a plot."""

from __future__ import annotations

import io
import json
from pathlib import Path
from tempfile import TemporaryDirectory

from sparing.measure.cells import write_whole
from sparing.measure.results import SDPA, SDPA_BF16, SDPA_PROJECTION, Bench
from sparing.report.bench import sides


def write_json(bench: Bench, path: Path) -> None:
    """All figures, with settings and machine; `read_json` gives back an equal object."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(bench.as_dict(), indent=1, allow_nan=False) + "\n")


def read_json(path: Path) -> Bench:
    """What `write_json` wrote."""
    return Bench.from_dict(json.loads(path.read_text()))


def write_plot(bench: Bench, path: Path) -> None:
    """Time over length, both logarithmic, one panel for each pass; needs matplotlib."""
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
        f"batch {s.batch}, {s.heads} heads x {s.width}, {s.threads} threads, {m['cpu']}", x=0.01, ha="left", fontsize=9
    )
    drawn = io.BytesIO()
    figure.savefig(drawn, format=path.suffix.lstrip("."), dpi=120)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, drawn.getvalue())


def check_folder(folder: Path) -> None:
    """Refuse, before anything is measured, a folder that cannot be written to; nothing remains of the try."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"out={str(folder)!r} is a file; name a folder")
    parent = next((p for p in (folder, *folder.absolute().parents) if p.exists()), folder)
    try:
        with TemporaryDirectory(dir=parent):
            pass
    except OSError:
        raise ValueError(f"out={str(folder)!r} cannot be written to; name another folder") from None
