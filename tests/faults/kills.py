"""Kill -9 at random moments and at every stage of a write: the next run ends as one that was left alone."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.faults.scenarios import Scenario
from tests.faults.server import STAGES, Ended, Server

BEFORE = b"what was there before"


def whole(path: Path) -> bool:
    """Whether a file ends as it should."""
    content = path.read_bytes()
    ends = {".json": b"}", ".html": b"</html>", ".png": b"IEND\xaeB`\x82"}
    return content.rstrip().endswith(ends[path.suffix]) if path.suffix in ends else content.endswith(b"\n")


class Kills:
    """Runs of one command, killed and resumed, beside one that was left alone."""

    def __init__(self, server: Server, given: Path, scenario: Scenario) -> None:
        self.server, self.given, self.scenario = server, given, scenario
        self.counts: Counter[str] = Counter()
        with self._folder() as folder:
            self.whole = self._run(folder)
            assert self.whole.status == 0, self.whole.err
            self.wanted = scenario.found(folder)
            self.all = scenario.progress(folder)

    @contextmanager
    def _folder(self) -> Iterator[Path]:
        with TemporaryDirectory(prefix="faults-") as name:
            folder = Path(name) / "work"
            shutil.copytree(self.given, folder)
            yield folder

    def _run(self, folder: Path, **options: Any) -> Ended:
        self.counts["runs"] += 1
        return self.server.run(list(self.scenario.arguments), folder, **options)

    def at_random(self, count: int, seed: int = 0) -> Counter[str]:
        """Kill so many processes, up to four in a row before one may end."""
        draw = random.Random(f"{self.scenario.name} {seed}")
        while self.counts["killed"] < count:
            with self._folder() as folder:
                for _ in range(draw.randint(1, 4)):
                    self._killed(folder, kill=draw.uniform(0, self.whole.seconds))
                self._resumed(folder)
        return self.counts

    def at_writes(self, numbers: Iterable[int], stages: Sequence[str] = STAGES) -> Counter[str]:
        """Kill at each stage of the writes with these numbers, counted from 1; old outputs are there before."""
        for number in numbers:
            for stage in stages:
                with self._folder() as folder:
                    for name in self.scenario.outputs:
                        (folder / name).parent.mkdir(exist_ok=True)
                        (folder / name).write_bytes(BEFORE)
                    if not self._killed(folder, die=[number, stage]):
                        return self.counts  # there are no more writes
                    self._resumed(folder)
        return self.counts

    def _killed(self, folder: Path, **how: Any) -> bool:
        before = self.scenario.progress(folder) if not self._untouched(folder) else {}
        ended = self._run(folder, **how)
        if ended.status != -9:
            assert ended.status == 0, ended.err
            self.counts["over before"] += 1
            return False
        self.counts["killed"] += 1
        self._check(folder, before)
        return True

    def _untouched(self, folder: Path) -> bool:
        """Whether outputs are still those of somebody else."""
        return any((folder / x).exists() and (folder / x).read_bytes() == BEFORE for x in self.scenario.outputs)

    def _check(self, folder: Path, before: dict[str, Any]) -> None:
        """Nothing visible is half written, and nothing that was kept is gone."""
        here = [folder / name for name in self.scenario.outputs if (folder / name).exists()]
        new = [path for path in here if path.read_bytes() != BEFORE]
        assert all(map(whole, new)), "no half of a file is ever seen"
        if len(new) == len(self.scenario.outputs):
            assert self.scenario.found(folder) == self.wanted, "an output that is there is whole"
        if any(path.name == "log.csv" and path.read_bytes() == BEFORE for path in here):
            return
        now = self.scenario.progress(folder)
        assert before.items() <= now.items(), "what was kept stays kept"
        self.counts["pieces found whole"] += len(now)

    def _resumed(self, folder: Path) -> None:
        before = {} if self._untouched(folder) else self.scenario.progress(folder)
        ended = self._run(folder)
        assert ended.status == 0, ended.err
        assert "damaged" not in ended.err
        assert self.scenario.found(folder) == self.wanted, "it ends as if it had not been killed"
        after = self.scenario.progress(folder)
        assert before.items() <= after.items(), "what was kept was not measured again"
        assert after.keys() == self.all.keys()
        self.counts["resumed to the same result"] += 1
