"""`sparing train`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparing.cli.files import check_files, reads, writes
from sparing.cli.options import console_of, needs_cli, progress_bar

if TYPE_CHECKING:
    from sparing_lab.training.config import Config


def add(commands: Any) -> None:
    """Declare the options: every setting of a run is one."""
    from sparing_lab.training.config import Config

    parser = commands.add_parser(
        "train", help="a small model on a task, or a pretrained one on, with any method",
        description="Options are settings of a run; --config reads them from a file, and options go before it.",
    )  # fmt: skip
    parser.set_defaults(run=run)
    parser.add_argument("task", nargs="?", metavar="TASK", help="--list shows them")
    parser.add_argument("--list", action="store_true", help="what tasks there are")
    reads(parser, "--config", metavar="FILE", help="JSON with settings by their names, such as --out wrote")
    writes(
        parser, "--out", metavar="FOLDER", names=_files,
        help="for checkpoints, log, curve and the model; a run that is in it goes on (default: runs/TASK-...)",
    )  # fmt: skip
    kinds = {"int": int, "float": float}
    for each in fields(Config):
        if each.name != "task":
            usual = "" if each.default is None or "default" in each.metadata["words"] else f" (default: {each.default})"
            declare = reads if each.name in ("data", "pretrained") else argparse.ArgumentParser.add_argument
            declare(
                parser, f"--{each.name}", type=kinds.get(str(each.type), str), metavar=each.name.upper(),
                help=(each.metadata["words"] + usual).replace("%", "%%"),
            )  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Check, train, write."""
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
    if {"steps", "epochs"} <= named.keys():
        raise ValueError(f"steps={named['steps']} and epochs={named['epochs']:g}: name one of the two")
    config = made({**settings, **({"epochs": 0.0} if "steps" in named else {}), **named})
    need_accelerate()
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
                console.print(f"stopped; the same command goes on from step {training.saved}")
            return 130
        training.export()
    if main:
        try:
            written = report.write(found, folder)
        finally:  # a full disk is no reason to hide what was measured
            report.show_end(found, console=console)
        for path in written:
            console.print(f"wrote {path}", soft_wrap=True)
        if config.tuned:
            console.print(f"wrote {folder / 'model'}, which transformers loads", soft_wrap=True)
    return 0


def _refuse_other_settings(options: argparse.Namespace, settings: Mapping[str, Any], config: Config) -> None:
    """Raise where options differ from the config.json of the run's own folder, which is read and not written.

    It would stay there and tell of settings that the run was not made with.
    """
    from sparing_lab.training.config import differences

    before = {**{each.name: each.default for each in fields(config)}, "task": None, **settings}
    if differ := differences(before, asdict(config)):
        raise ValueError(
            f"--config={options.config} holds the settings of the run in --out={options.out}, and this would be "
            f"another run ({differ}); name another folder with --out, or edit the file and remove its entry 'sha256'"
        )


def _files(options: argparse.Namespace) -> list[str]:
    """Return what is written into the folder: not the settings, where these are read from there."""
    from sparing_lab.training.checkpoint import FILES, REPORTS

    own, given = Path(options.out) / "config.json", options.config
    same = given is not None and own.exists() and Path(given).exists() and own.samefile(given)
    return [*FILES, *REPORTS, *([] if same else ["config.json"])]
