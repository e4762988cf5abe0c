"""`sparing train`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparing.cli.files import check_files, reads, writes
from sparing.cli.options import add_import, console_of, needs_cli, progress_bar

if TYPE_CHECKING:
    from sparing_lab.training.config import Config


class _Renamed(argparse.Action):
    """An option of an earlier version, which is refused with its present name."""

    def __call__(self, parser: argparse.ArgumentParser, options: Any, values: Any, flag: str | None = None) -> None:
        parser.error(f"{flag} is now {self.const}")


def add(commands: Any) -> None:
    """Declare the options: every setting of a run is one."""
    from sparing_lab.training.config import RENAMED, Config

    parser = commands.add_parser(
        "train", help="train a small model with any attention method, or fine-tune a pretrained one",
        description="Train a model on a task with any attention method. The same command resumes a run that was "
        "stopped.",
    )  # fmt: skip
    parser.set_defaults(run=run)
    parser.add_argument("task", nargs="?", metavar="TASK", help="task to train on; see --list")
    parser.add_argument("--list", action="store_true", help="list the tasks and exit")
    reads(
        parser, "--config", metavar="FILE",
        help="JSON file with settings, such as the config.json of a run; options override it",
    )  # fmt: skip
    writes(
        parser, "--out", metavar="FOLDER", names=_files,
        help="folder for checkpoints, log, result, curve and model; a run in it is resumed (default: runs/TASK-...)",
    )  # fmt: skip
    add_import(parser)
    kinds = {"int": int, "float": float}
    for each in fields(Config):
        if each.name != "task":
            text = each.metadata["help"]
            usual = "" if each.default is None or "default" in text else f" (default: {each.default})"
            declare = reads if each.name in ("data", "pretrained") else argparse.ArgumentParser.add_argument
            declare(
                parser, f"--{each.name.replace('_', '-')}", type=kinds.get(str(each.type), str),
                metavar=each.name.upper(), help=(text + usual).replace("%", "%%"),
            )  # fmt: skip
    for old, new in RENAMED.items():
        flag = f"--{new.replace('_', '-')}"
        parser.add_argument(f"--{old}", action=_Renamed, nargs="*", const=flag, help=argparse.SUPPRESS)
    parser.add_argument(
        "--race", metavar="METHODS",
        help="do not train, but time training steps with these comma-separated methods against exact attention",
    )  # fmt: skip
    parser.add_argument(
        "--lengths", type=int, nargs="+", metavar="N", help="with --race: lengths to time (default: --max-length)"
    )
    parser.add_argument("--rounds", type=int, help="with --race: number of steps that are timed (default: 5)")


def run(options: argparse.Namespace) -> int:
    """Train and write the results, or time training steps."""
    with needs_cli():
        from sparing_lab.report import train as report
    from sparing_lab.figure import need_matplotlib
    from sparing_lab.training.config import Config, made, read
    from sparing_lab.training.loop import Training
    from sparing_lab.training.processes import need_accelerate

    console = console_of()
    if options.list:
        console.print(report.tasks_table())
        return 0
    settings = {} if options.config is None else read(Path(options.config))
    named = {each.name: value for each in fields(Config) if (value := getattr(options, each.name)) is not None}
    if {"max_steps", "epochs"} <= named.keys():
        raise ValueError(f"max_steps={named['max_steps']} and epochs={named['epochs']:g}: set one of the two")
    config = made({**settings, **({"epochs": 0.0} if "max_steps" in named else {}), **named})
    need_accelerate()
    if options.race is not None:
        return _race(options, config)
    if options.lengths is not None or options.rounds is not None:
        raise ValueError("--lengths and --rounds belong to --race")
    need_matplotlib("train")
    if not options.out:
        options.out = str(Path("runs") / f"{config.task}-{report.short(config)}")
        check_files(options)
    folder, settings_too = Path(options.out), "config.json" in _files(options)
    if not settings_too:
        _refuse_other_settings(options, settings, config)
    with progress_bar() as progress:
        training = Training(config, folder, tell=progress)
        main = training.accelerator.is_main_process
        folder.mkdir(parents=True, exist_ok=True)
        again = training.resume()
        if main:
            report.show_start(training, again, console=console)
        training.on_record = lambda: report.write_log(training, folder, settings=settings_too)
        try:
            found = training.run()
        except KeyboardInterrupt:
            if main:
                console.print(f"stopped; the same command resumes from step {training.saved}")
            return 130
        training.export()
    if main:
        try:
            written = report.write(found, folder)
        finally:  # what was measured is shown even if the disk is full
            report.show_end(found, console=console)
        for path in written:
            console.print(f"wrote {path}", soft_wrap=True)
        if config.tuned:
            console.print(f"wrote {folder / 'model'}, which transformers loads", soft_wrap=True)
    return 0


def _race(options: argparse.Namespace, config: Config) -> int:
    """Print a table of step times in Markdown, each row as soon as it is measured."""
    from sparing.spec import split_specs
    from sparing_lab.tasks.kinds import KINDS
    from sparing_lab.training.race import time_steps

    for flag, given in (("--out", options.out), ("--method", options.method)):
        if given is not None:
            raise ValueError(f"{flag}={given} has no meaning with --race, which writes nothing and names its methods")
    specs, console = split_specs(options.race), console_of()
    rounds = 5 if options.rounds is None else options.rounds
    head = f"| tokens | exact step | {' | '.join(f'`{spec}`' for spec in specs)} |"
    console.print(f"{head}\n|{'---|' * (head.count('|') - 1)}", soft_wrap=True)
    for length in options.lengths or [config.max_length]:
        found = time_steps(replace(config, max_length=length), specs, rounds=rounds)
        cells = (f"{each.median:.2f}x ({each.low:.2f} to {each.high:.2f})" for each in found.ratios)
        tokens = length or KINDS[config.task].length
        console.print(f"| {tokens} | {found.exact.median:.3f} s | {' | '.join(cells)} |", soft_wrap=True)
    return 0


def _refuse_other_settings(options: argparse.Namespace, settings: Mapping[str, Any], config: Config) -> None:
    """Raise if options differ from the config.json of the run's own folder, which is read and not written.

    The file would otherwise hold other settings than those of the run.
    """
    from sparing_lab.training.config import differences

    before = {**{each.name: each.default for each in fields(config)}, "task": None, **settings}
    if differ := differences(before, asdict(config)):
        raise ValueError(
            f"--config={options.config} holds the settings of the run in --out={options.out}, and these options "
            f"make another run ({differ}); name another folder with --out, or edit the file and remove its entry "
            "'sha256'"
        )


def _files(options: argparse.Namespace) -> list[str]:
    """Return the names of files written into the folder; config.json is not among them if it is read from there."""
    from sparing_lab.training.checkpoint import FILES, REPORTS

    own, given = Path(options.out) / "config.json", options.config
    same = given is not None and own.exists() and Path(given).exists() and own.samefile(given)
    return [*FILES, *REPORTS, *([] if same else ["config.json"])]
