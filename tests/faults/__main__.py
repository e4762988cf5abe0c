"""`make faults`: kill, fill and damage, at length; prints the table of docs/faults.md.

python -m tests.faults [COMMAND ...] [--kills N] [--damages N] [--seed N]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.faults.damage import KINDS, damage
from tests.faults.disks import Disks, can_mount
from tests.faults.kills import Kills
from tests.faults.reruns import Reruns
from tests.faults.scenarios import KEPT, SCENARIOS, prepare
from tests.faults.server import Server

PAGE = 4096
FREE = [0, PAGE, 2 * PAGE, 4 * PAGE, 8 * PAGE, 16 * PAGE, 64 * PAGE, 2 * 2**20, 8 * 2**20]


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def row(what: str, how: str, counts: Counter[str], start: float) -> None:
    shown = ", ".join(f"{number:,} {name}" for name, number in counts.items() if name != "runs")
    say(f"| {what} | {how} | {shown} | {time.monotonic() - start:.0f} s |")


def main() -> None:
    """Run everything; the first fault that loses something stops it with an error."""
    parser = argparse.ArgumentParser(description=__doc__)
    names = [scenario.name for scenario in SCENARIOS]
    parser.add_argument("commands", nargs="*", help=f"of {', '.join(names)}; default: all, and files of all kinds")
    parser.add_argument("--kills", type=int, default=40, help="of each command, at random moments")
    parser.add_argument("--damages", type=int, default=2000, help="of each kind of file")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    from sparing.workbench.machine import machine

    here: dict[str, Any] = machine()
    say(f"{here['cpu']}, torch {here['torch']}, transformers {here['transformers']}, seed {options.seed}\n")
    say("| what | fault | result | time |\n|---|---|---|---|")
    with TemporaryDirectory(prefix="faults-") as name:
        for kind in () if options.commands else KINDS:
            (folder := Path(name) / "damage" / kind.name.replace("/", " ")).mkdir(parents=True)
            start = time.monotonic()
            row(kind.name, "bytes", damage(kind, folder, options.damages, str(options.seed)), start)
        server, given = Server(), prepare(Path(name) / "given")
        mounted = can_mount()
        for scenario in (each for each in SCENARIOS if each.name in (options.commands or names)):
            command = f"`sparing {scenario.name}`"
            start, kills = time.monotonic(), Kills(server, given, scenario)
            row(command, "kill -9 at a random moment", kills.at_random(options.kills, options.seed), start)
            start, kills = time.monotonic(), Kills(server, given, scenario)
            writes = {1, 2, 4, 8, 16, *(len(kills.all) + number for number in range(1, 1 + len(scenario.outputs)))}
            row(command, "kill -9 at the four stages of a write", kills.at_writes(sorted(writes)), start)
            start, reruns = time.monotonic(), Reruns(server, given, scenario)
            found = (reruns.damage_kept if KEPT in scenario.arguments else reruns.damage_run)(10, options.seed)
            row(command, "bytes of its files", found, start)
            start, disks = time.monotonic(), Disks(server, given, scenario)
            found = disks.full_outputs(FREE) if mounted else disks.full_outputs([1000, 20_000], limit=True)
            row(command, "outputs on a full disk" if mounted else "files of limited size", found, start)
            if mounted and KEPT in scenario.arguments:
                start, disks = time.monotonic(), Disks(server, given, scenario)
                row(command, "kept results on a full disk", disks.full_cache(FREE[:6]), start)
        server.close()


if __name__ == "__main__":
    main()
