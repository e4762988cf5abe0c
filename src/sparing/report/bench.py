"""Print a benchmark as terminal tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

from rich import box
from rich.table import Table

from sparing.report.terminal import Terminal, least_width
from sparing.workbench.benchmark.results import (
    PEER_TARGET,
    PEER_TARGET_LENGTH,
    SDPA,
    SDPA_BF16,
    SDPA_PROJECTION,
    TARGET_SIZES,
    Bench,
    Fact,
    Pass,
    Target,
    baseline,
)
from sparing.workbench.timing import Interval

Lengths = Sequence[int]


def show(bench: Bench, *, console: Terminal | None = None, targets: bool = False) -> None:
    """Print everything; targets: also the figures that developers hold the kernels to."""
    console = console or Terminal()
    console.print(head(bench))
    if bench.disturbed:
        console.print(
            f"This machine was busy: {bench.disturbed}. Trust no time below; run it again.", style="bold yellow"
        )
    for table in tables(bench, console.width, targets=targets):
        console.print(table)
    console.print(notes(bench, targets=targets))


def tables(bench: Bench, width: int, *, targets: bool = False) -> list[Table]:
    """Return the tables: ratios for each pass, times and memory, public implementations.

    Where all lengths are too wide, a table is made of several, each with some of them.
    """
    kinds: list[Callable[[Bench, Pass, Lengths], Table]]
    kinds = [partial(_ratio_table, targets=targets), _cost_table, *([_peer_table] if bench.settings.peers else [])]
    return [table for kind in kinds for part in bench.settings.passes for table in _split(kind, bench, part, width)]


def _split(kind: Callable[[Bench, Pass, Lengths], Table], bench: Bench, part: Pass, width: int) -> list[Table]:
    lengths, made = bench.settings.lengths, []
    for each in range(len(lengths), 0, -1):
        made = [kind(bench, part, lengths[start : start + each]) for start in range(0, len(lengths), each)]
        if all(least_width(table) <= width for table in made):
            break
    for before, after in pairwise(made):
        before.caption = after.title = None
    return made


def head(bench: Bench) -> str:
    """Return the lines that say what was measured, and on which machine."""
    s, m = bench.settings, bench.machine
    kernels = f"kernels: {m['instruction_set']}" if m.get("instruction_set") else "no kernels: plain PyTorch"
    return (
        f"batch {s.batch}, {s.heads} heads x {s.width}, {s.dtype}, {s.threads} threads; "
        f"{m.get('cpu')}, {m.get('cores')} cores, {kernels}, torch {m.get('torch')}\ninputs: {bench.inputs}\n"
    )


def _table(title: str, caption: str, lengths: Lengths, *last: str) -> Table:
    table = Table(
        title=title, title_justify="left", caption=caption, caption_justify="left", box=box.SIMPLE_HEAD, pad_edge=False,
    )  # fmt: skip
    table.add_column("", no_wrap=True)
    for name in (*map(str, lengths), *last):
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _ratio_table(bench: Bench, part: Pass, lengths: Lengths, *, targets: bool) -> Table:
    caption = (
        "Time of SDPA in float32 / time of the method: median, quartiles of one run; above 1 is faster. bf16: against "
        f"SDPA in bfloat16.{' >= is the target.' * targets} Crossover: from there on the method is faster.  -: not "
        "measured, see below."
    )
    table = _table(f"Speed against exact attention, {part}", caption, lengths, "crossover")
    wanted = {(t.method, t.length): t for t in bench.targets() if t.part == part and targets}
    for spec in bench.settings.methods:
        gate = bench.gate(spec)
        if gate is not None and not gate.passed:
            table.add_row(spec, *["red"] * len(lengths), "-")
            continue
        cells = [_ratio_cell(bench, spec, n, part, wanted.get((spec, n))) for n in lengths]
        table.add_row(spec + _mark(spec), *cells, str(bench.crossover(spec, part)))
    return table


def _mark(spec: str) -> str:
    return " +" if baseline(spec) == SDPA_PROJECTION else ""


def _ratio_cell(bench: Bench, spec: str, length: int, part: Pass, target: Target | None) -> str:
    lines = []
    ratio = bench.ratio(spec, baseline(spec), length, part)
    lines += ["-"] if ratio is None else [_times(ratio.speed.median), f"{_span(ratio.speed)}"]
    rough = bench.ratio(spec, SDPA_BF16, length, part)
    lines += [] if rough is None else [f"bf16 {_times(rough.speed.median)}"]
    if target is not None:
        verdict = "not run" if ratio is None else "met" if ratio.speed.median >= target.ratio else "SHORT"
        lines.append(f">={target.ratio:g} {verdict}")
    return "\n".join(lines)


def _cost_table(bench: Bench, part: Pass, lengths: Lengths) -> Table:
    caption = "Median seconds of a call, and its peak memory beyond the inputs (what the system saw, kernels included)."
    table = _table(f"Time and memory, {part}", caption, lengths)
    for side in sides(bench):
        cells = []
        for length in lengths:
            found = bench.timing(side, length, part)
            if found is None or found.seconds is None:
                cells.append("-")
                continue
            cells.append(_seconds(found.seconds.median) + ("" if found.memory is None else f"\n{_bytes(found.memory)}"))
        table.add_row(side, *cells)
    return table


def sides(bench: Bench) -> list[str]:
    """Return the names of what was timed: baselines, methods, then public implementations."""
    known = dict.fromkeys(t.side for t in bench.timings)
    own = [name for name in (SDPA, SDPA_BF16, SDPA_PROJECTION, *bench.settings.methods) if name in known]
    return [*own, *(name for name in known if name not in own)]


def _peer_table(bench: Bench, part: Pass, lengths: Lengths) -> Table:
    caption = (
        "Time of the public implementation / time of the method here. Their projections are replaced by the given q, "
        "k and v and take no time; Reformer's keys are its queries."
    )
    table = _table(f"Speed against public implementations, {part}", caption, lengths, "version")
    for status in bench.peers:
        if status.peer == "-":
            continue
        against = f"{status.peer} for {status.method}"
        found = [bench.ratio(status.method, against, n, part) for n in lengths]
        cells = ["-" if r is None else f"{_times(r.speed.median)}\n{_span(r.speed)}" for r in found]
        table.add_row(against, *cells, status.version or "not installed")
    return table


def notes(bench: Bench, *, targets: bool = False) -> str:
    """Return the lines below the tables: why figures are missing, and with `targets` which are met or not."""
    lines = [*_target_lines(bench), *_peer_target_lines(bench), *map(_fact_line, bench.facts)] if targets else []
    red = [gate for gate in bench.gates if not gate.passed]
    lines += [f"RED: {g.method}: {g.detail}, at {g.length} tokens; no ratio is stated" for g in red]
    if bench.gates and not red:
        length = bench.gates[0].length
        lines.append(f"Every method agrees with its reference, at {length} tokens, within the error of float32.")
    if any(_mark(spec) for spec in bench.settings.methods):
        lines.append("+ compared with SDPA plus the value projection, whose work it samples")
    missing = [f"{p.peer} for {p.method}: {p.why}" for p in bench.peers if p.why and p.peer != "-"]
    without = [p.method for p in bench.peers if p.peer == "-"]
    lines += missing + ([f"no public implementation for CPUs known here: {', '.join(without)}"] if without else [])
    lines += [
        f"not measured: {side}, {part}, {', '.join(map(str, lengths))} tokens: {why}"
        for (side, part, why), lengths in _absent(bench).items()
    ]
    return "\n".join([*lines, f"took {bench.duration / 60:.1f} minutes"])


def _absent(bench: Bench) -> dict[tuple[str, str, str], list[int]]:
    red = {gate.method for gate in bench.gates if not gate.passed}
    found: dict[tuple[str, str, str], list[int]] = {}
    for timing in bench.timings:
        if timing.seconds is None and timing.side not in red:
            found.setdefault((timing.side, timing.part, timing.why), []).append(timing.length)
    return found


def _target_lines(bench: Bench) -> list[str]:
    targets = bench.targets()
    if not targets:
        sizes = ", ".join(f"{name} {size}" for name, size in TARGET_SIZES.items())
        return [
            f"Targets are stated for {sizes}, and some of the default methods and lengths: this run can judge none."
        ]
    met, short, absent = [], [], []
    for target in targets:
        ratio = bench.ratio(target.method, SDPA, target.length, target.part)
        text = f"{target.method} {target.part} at {target.length}: "
        if ratio is None:
            absent.append(f"{text}>={target.ratio:g}x")
        elif ratio.speed.median >= target.ratio:
            met.append(text)
        else:
            short.append(f"{text}{ratio.speed.median:.3g}x, target {target.ratio:g}x")
    lines = [f"{len(met)} of {len(targets)} targets met."]
    lines += [f"short of its target: {text}" for text in short]
    return lines + [f"target not measured: {text}" for text in absent]


def _peer_target_lines(bench: Bench) -> list[str]:
    """Return a line for each method against its fastest public implementation."""
    lines = []
    for spec in bench.settings.methods if PEER_TARGET_LENGTH in bench.settings.lengths else ():
        against = [f"{p.peer} for {p.method}" for p in bench.peers if p.method == spec]
        found = [bench.ratio(spec, name, PEER_TARGET_LENGTH, "forward") for name in against]
        ratios = [r for r in found if r is not None]
        if ratios:
            least = min(ratios, key=lambda r: r.speed.median)
            verdict = "met" if least.speed.median >= PEER_TARGET else "SHORT"
            lines.append(
                f"{_times(least.speed.median)} against {least.against}, forward, {PEER_TARGET_LENGTH} tokens"
                f" (>={PEER_TARGET:g} {verdict})"
            )
    return lines


def _fact_line(fact: Fact) -> str:
    if fact.value is None:
        return f"{fact.name}: {fact.why}"
    verdict = ""
    if fact.met is not None:
        target = f"<={fact.at_most:g}" if fact.at_least is None else f">={fact.at_least:g}"
        verdict = f"; {target} {'met' if fact.met else 'SHORT'}"
    shown = _times(fact.value.median)
    return f"{fact.name}: {shown.rstrip('x') if fact.at_most else shown} ({_span(fact.value)}{verdict})"


def _times(value: float) -> str:
    return f"{value:.2f}x" if value < 10 else f"{value:.1f}x" if value < 100 else f"{value:.0f}x"


def _span(value: Interval) -> str:
    digits = 2 if value.median < 10 else 1 if value.median < 100 else 0
    return f"{value.low:.{digits}f}-{value.high:.{digits}f}"


def _seconds(value: float) -> str:
    if value < 0.9995e-3:
        return f"{value * 1e6:.0f} us"
    return f"{_three(value * 1e3)} ms" if value < 0.9995 else f"{_three(value)} s"


def _bytes(value: float) -> str:
    for unit in ("KiB", "MiB"):
        value /= 1024
        if value < 999.5:
            return f"{_three(value)} {unit}"
    return f"{_three(value / 1024)} GiB"


def _three(value: float) -> str:
    """Return three digits, without an exponent."""
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
