"""A training run in the terminal and as files."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from sparing.from_json import build
from sparing.report.kinds import Kind
from sparing.report.terminal import Terminal
from sparing.store import add_checksum, verify_checksum, write_files
from sparing.workbench.machine import machine
from sparing_lab.figure import drawn, panels, style
from sparing_lab.tasks.kinds import KINDS
from sparing_lab.training.checkpoint import REPORTS
from sparing_lab.training.config import Config, made, renamed
from sparing_lab.training.loop import Training
from sparing_lab.training.result import Trained

FORMAT = 1  #: of result.json


def tasks_table() -> Table:
    """Return a table of the tasks."""
    table = Table(
        caption="Without --data, examples are generated or come with installed packages. hub:NAME takes a dataset of "
        "the hub where the task reads files.", caption_justify="left", box=box.SIMPLE_HEAD, pad_edge=False,
    )  # fmt: skip
    for name in ("task", "length", "what is asked", "--data"):
        table.add_column(name, no_wrap=name != "what is asked", justify="right" if name == "length" else "left")
    for name, kind in KINDS.items():
        table.add_row(name, str(kind.length), kind.about, kind.data)
    return table


def short(config: Config) -> str:
    """Return a name for the folder of a run: its method and a hash of its settings."""
    method = "".join(letter if letter.isalnum() else "-" for letter in config.method).strip("-")
    return f"{method[:40]}-{config.fingerprint[:6]}"


def show_start(training: Training, again: bool, *, console: Terminal) -> None:
    """Print the task, the model and whether the run is resumed."""
    task, config = training.task, training.config
    weights = sum(weight.numel() for weight in training.bare.parameters() if weight.requires_grad)
    name = f"{task.name} {task.part}".strip()
    lines = [
        f"{name} ({task.data}): {len(task.train)} training and {len(task.valid)} held-out examples of up to "
        f"{task.length} tokens",
        f"{config.method}, {weights:,} parameters, {config.max_steps} steps of {config.batch_size} examples",
    ]
    if training.accelerator.num_processes > 1:
        lines[1] += f", {training.accelerator.num_processes} processes"
    if again:
        lines.append(f"resumes from step {training.step}")
    console.print("\n".join(lines), soft_wrap=True)


def show_end(found: Trained, *, console: Terminal) -> None:
    """Print all evaluations, and the best one beside chance."""
    console.print(_records_table(found.records, found.times))
    metric, chance = found.task.metric, found.task.chance()
    said = "better than chance" if found.beats_chance else f"NOT shown to be better on {len(found.task.valid)} examples"
    order = ""
    if found.task.objective == "order":
        order = f", its order accuracy {found.best['order_accuracy']:.4g} beside {found.task.commonest():.4g}"
    console.print(
        f"best {metric} {found.metric:.4g} at step {found.best['step']:.0f}; a model that only knows how often each "
        f"answer occurs has {chance:.4g}{order}: {said}",
        soft_wrap=True,
    )


def _records_table(records: Sequence[Mapping[str, float]], times: Sequence[float]) -> Table:
    """Return a row for each evaluation."""
    columns = [name for name in records[0] if name != "step"]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("step", "seconds", *columns):
        table.add_column(name.replace("_", " "), justify="right")
    for record, seconds in zip(records, times, strict=True):
        table.add_row(f"{record['step']:.0f}", f"{seconds:.1f}", *(f"{record[name]:.4g}" for name in columns))
    return table


@dataclass(frozen=True)
class SavedRun:
    """The result.json of a run, checked."""

    config: dict[str, Any]
    data: str
    metric: str
    value: float  #: the metric of the best evaluation
    chance: float  #: of a model that knows how often each answer occurs
    beats_chance: bool
    best: dict[str, float]
    seconds: float
    records: tuple[dict[str, float], ...]
    times: tuple[float, ...]  #: seconds until each record
    losses: tuple[float, ...]
    machine: dict[str, Any]


def _read_run(held: Mapping[str, Any]) -> SavedRun:
    """Return a run from the parsed result.json; a ValueError says what is wrong."""
    held = verify_checksum(held)
    if held.pop("format", None) != FORMAT:
        raise ValueError(f"this format of a training run is not known; this sparing reads {FORMAT}")
    found = build(SavedRun, held)
    names = found.records[0].keys() if found.records else ()
    if "step" not in names or any(record.keys() != names for record in found.records):
        raise ValueError("records must each have 'step' and the same other entries")
    if len(found.times) != len(found.records) or "step" not in found.best:
        raise ValueError("there must be as many times as records, and best must have 'step'")
    return found


def _show_run(found: SavedRun, console: Terminal) -> None:
    config = found.config
    console.print(f"{config.get('task')} ({found.data}) with {config.get('method')}: {len(found.losses)} steps")
    console.print(_records_table(found.records, found.times))
    said = "better than" if found.beats_chance else "NOT shown to be better than"
    console.print(
        f"best {found.metric} {found.value:.4g} at step {found.best['step']:.0f}, {said} {found.chance:.4g} of a model "
        f"that knows how often each answer occurs; {found.seconds:.0f} s",
        soft_wrap=True,
    )


def _read_settings(held: Mapping[str, Any]) -> Config:
    """Return the settings of a run from a parsed config.json; a ValueError says what is wrong."""
    return made(renamed(verify_checksum(held), "config"))


def _show_settings(config: Config, console: Terminal) -> None:
    console.print(f"settings of a training run: {config.task}")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("setting", "value", "default"):
        table.add_column(name)
    for each in fields(config):
        value = getattr(config, each.name)
        if each.name != "task":
            table.add_row(each.name, str(value), "" if value == each.default else str(each.default))
    console.print(table)


#: For `sparing show`: the result.json and the config.json of a run.
RUN = Kind("training run", ("losses", "records"), _read_run, _show_run)
SETTINGS = Kind("training run's settings", ("task",), _read_settings, _show_settings)


def _log(losses: Sequence[float], records: Sequence[dict[str, float]], times: Sequence[float]) -> str:
    """Return the log as CSV: a row for each step, with the evaluation after it if there was one."""
    columns = [name for name in records[0] if name not in ("step", "loss")]
    written = io.StringIO()
    table = csv.writer(written, lineterminator="\n")
    table.writerow(["step", "loss", *columns, "seconds"])
    found = {int(record["step"]): (record, seconds) for record, seconds in zip(records, times, strict=True)}
    for step, loss in enumerate(losses, 1):
        record, seconds = found.get(step, ({}, ""))
        table.writerow([step, loss, *(record.get(name, "") for name in columns), seconds])
    return written.getvalue()


def write_log(training: Training, folder: Path, *, settings: bool = True) -> None:
    """Write the log so far and, with `settings`, the config.json that --config reads."""
    contents = {folder / "log.csv": _log(training.losses, training.records, training.times)}
    if settings:
        contents[folder / "config.json"] = json.dumps(add_checksum(asdict(training.asked)), indent=1) + "\n"
    write_files(contents)


def write(found: Trained, folder: Path) -> list[Path]:
    """Write the result as JSON, the log as CSV and the curve, all or none of them."""
    held = {
        "format": FORMAT, "config": asdict(found.config), "data": found.task.data, "metric": found.task.metric,
        "value": found.metric, "chance": found.task.chance(),
        "beats_chance": found.beats_chance, "best": found.best, "seconds": found.seconds,
        "records": list(found.records), "times": list(found.times), "losses": list(found.losses), "machine": machine(),
    }  # fmt: skip
    result, log, curve = (folder / name for name in REPORTS)
    write_files({
        result: json.dumps(held, indent=1) + "\n",
        log: _log(found.losses, found.records, found.times),
        curve: drawn(lambda figure: _draw(found, figure), curve),
    })  # fmt: skip
    return [result, log, curve]


def _draw(found: Trained, figure: Any) -> None:
    """Draw training and held-out loss, and the metric beside chance."""
    loss, metric = panels(figure, 1, 2)
    steps = range(1, len(found.losses) + 1)
    at = [record["step"] for record in found.records]
    loss.plot(steps, found.losses, color=style(0)["color"], linewidth=0.8, alpha=0.6, label="training")
    held = [record["valid_loss"] + record.get("order_loss", 0.0) for record in found.records]
    loss.plot(at, held, **style(1), label="held out")
    loss.set(xlabel="steps", ylabel="loss (nats)" if found.task.objective != "score" else "squared error")
    loss.legend()
    name, chance = found.task.metric, found.task.chance()
    metric.plot(at, [record[name] for record in found.records], **style(1), label=found.config.method)
    metric.axhline(chance, color="black", linestyle=":", label="chance")
    metric.set(xlabel="steps", ylabel=name, yscale="log" if name == "perplexity" else "linear")
    metric.yaxis.set_major_formatter("{x:g}")
    metric.yaxis.set_minor_formatter("{x:g}")
    metric.legend()
    title = f"{found.task.name} {found.task.part}".strip()
    figure.suptitle(f"{title}: {found.task.data}", x=0.01, ha="left", fontsize=9)
