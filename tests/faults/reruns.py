"""Damage what finished runs left, and run them again: the same results, whatever was lost."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

from tests.faults.damage import damaged
from tests.faults.kills import Kills
from tests.faults.scenarios import KEPT


class Reruns(Kills):
    """Finished runs of one command, whose files are damaged."""

    def damage_kept(self, times: int, seed: int = 0) -> Counter[str]:
        """Damage about half of all kept results and all outputs at once; the command measures and writes them again."""
        draw = random.Random(f"{self.scenario.name} {seed}")
        with self._folder() as folder:
            assert self._run(folder).status == 0
            for number in range(times):
                hit = [path for path in sorted((folder / KEPT).glob("*.json")) if draw.random() < 0.5]
                for path in [*hit, *(folder / name for name in self.scenario.outputs)]:
                    _damage(path, f"{path.name} {number} {seed}")
                ended = self._run(folder)
                assert ended.status == 0, ended.err
                assert ended.err.count("is damaged or of an older version; such results are measured again") <= 1
                assert self.scenario.found(folder) == self.wanted
                self.scenario.progress(folder)
                self.counts["kept results damaged"] += len(hit)
                self.counts["outputs damaged"] += len(self.scenario.outputs)
                self.counts["runs with the same result"] += 1
        return self.counts

    def damage_run(self, times: int, seed: int = 0) -> Counter[str]:
        """Damage what a training wrote: its reports are written again, its last checkpoint is refused by name."""
        with self._folder() as folder:
            assert self._run(folder).status == 0
            last = folder / "run/last.pt"
            whole = last.read_bytes()
            for number in range(times):
                for name in self.scenario.outputs:
                    _damage(folder / name, f"{name} {number} {seed}")
                assert self._run(folder).status == 0
                assert self.scenario.found(folder) == self.wanted
                self.counts["outputs damaged"] += len(self.scenario.outputs)
                _damage(last, f"last {number} {seed}")
                spoilt = last.read_bytes()
                ended = self._run(folder)
                if ended.status == 0:  # the checksum itself was hit: the parts have their own
                    assert spoilt[: len(whole) - 81] == whole[: len(whole) - 81]
                else:
                    assert ended.status == 2
                    assert ended.err.count("\n") == 1
                    assert "last.pt is damaged" in ended.err
                    assert last.read_bytes() == spoilt
                    self.counts["refused by name"] += 1
                last.write_bytes(whole)
                self.counts["checkpoints damaged"] += 1
                self.counts["runs with the same result"] += 1
        return self.counts


def _damage(path: Path, seed: str) -> None:
    content = path.read_bytes()
    draw = random.Random(seed).randrange(8)
    found = [changed for _, changed in damaged(content, 16, seed)]
    path.write_bytes(found[draw % len(found)])
