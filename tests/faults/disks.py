"""A full disk: the command ends with one line that names the file, and what was there before is still there."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.faults.kills import BEFORE, Kills
from tests.faults.scenarios import KEPT
from tests.faults.server import Ended

_PAGE = 4096
_DISK = 16 * 2**20


@contextmanager
def small_disk(folder: Path, free: int) -> Iterator[Path]:
    """A disk of its own in a folder, on which so many bytes are free; the content of the folder is put there first."""
    filler = folder / "filler"
    content = folder.with_name("content")
    folder.rename(content)
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={_DISK}", "none", str(folder)], check=True)
    try:
        shutil.copytree(content, folder, dirs_exist_ok=True)
        with open(filler, "wb", buffering=0) as file:
            while True:
                try:
                    if file.write(bytes(_PAGE)) < _PAGE:
                        break
                except OSError:
                    break
        os.truncate(filler, filler.stat().st_size - free)
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def can_mount() -> bool:
    """Whether disks can be mounted here: root may, in most places."""
    with TemporaryDirectory() as name:
        (folder := Path(name) / "disk").mkdir()
        try:
            with small_disk(folder, 0):
                return True
        except (OSError, subprocess.CalledProcessError):
            return False


class Disks(Kills):
    """Runs of one command on disks that are full, or fill up."""

    def full_outputs(self, free: list[int], *, limit: bool = False) -> Counter[str]:
        """Write to a disk with so many bytes left; limit: files may have no more bytes, and no disk is mounted."""
        for size in free:
            with self._folder() as folder:
                self._former(folder)
                before = _contents(folder / "disk")
                if limit:
                    ended = self._on_disk(folder, limit=size)
                    self._judge(folder, ended, before)
                else:
                    with small_disk(folder / "disk", size):
                        ended = self._on_disk(folder)
                        self._judge(folder, ended, before)
        return self.counts

    def _former(self, folder: Path) -> None:
        """What is on the disk before: old outputs; of a training, a run that was killed."""
        disk = folder / "disk"
        disk.mkdir()
        if self.scenario.name == "train":
            self._run(folder, die=[8, "renamed"])
            (folder / "run").rename(disk / "run")
        for name in () if self.scenario.name == "train" else self.scenario.outputs:
            (disk / name).parent.mkdir(exist_ok=True)
            (disk / name).write_bytes(BEFORE)

    def _on_disk(self, folder: Path, **options: int) -> Ended:
        moved = {name: f"disk/{name}" for name in ("found.json", "found.html", "planned", "out", "run")}
        given = [moved.get(word, word) for word in self.scenario.arguments if word not in ("--cache", KEPT)]
        self.counts["runs"] += 1
        return self.server.run(
            [*given, *(["--no-cache"] if KEPT in self.scenario.arguments else [])], folder, **options
        )

    def _judge(self, folder: Path, ended: Ended, before: dict[str, bytes]) -> None:
        disk = folder / "disk"
        if ended.status == 0:
            assert self.scenario.found(disk) == self.wanted
            self.counts["had room"] += 1
            return
        lines = [line for line in ended.err.splitlines() if "results are not kept" not in line]
        assert ended.status == 2, ended
        assert len(lines) == 1, ended.err
        assert "disk/" in lines[0], "the line names the file"
        assert "No space left on device" in lines[0] or "File too large" in lines[0], lines
        after = _contents(disk)
        assert not [name for name in after.keys() - before.keys() if name.endswith(".part")]
        if self.scenario.name == "train":  # what is there may be of a later step
            found = self.scenario.progress(disk)
            assert found
            assert found.items() <= self.all.items()
        else:
            assert after == before
        self.counts["refused by name, former files intact"] += 1
        if self.scenario.name == "train":
            (disk / "filler").unlink(missing_ok=True)
            assert self._on_disk(folder).status == 0
            assert self.scenario.found(disk) == self.wanted
            self.counts["resumed to the same result"] += 1

    def full_cache(self, free: list[int]) -> Counter[str]:
        """Keep results on a disk with so many bytes left: in the usual folder, and in one that was named."""
        arguments = [word for word in self.scenario.arguments if word not in ("--cache", KEPT)]
        for size in free:
            for named in (False, True):
                with self._folder() as folder:
                    (folder / "disk").mkdir()
                    with small_disk(folder / "disk", size):
                        given = [*arguments, "--cache", "disk/sparing"] if named else arguments
                        ended = self.server.run(given, folder, environment={"XDG_CACHE_HOME": str(folder / "disk")})
                        self.counts["runs"] += 1
                        if named and size == 0:
                            assert ended.status == 2, ended
                            assert "disk/sparing cannot be written to (No space left on device)" in ended.err
                            assert ended.err.count("\n") == 1
                            self.counts["refused by name before measuring"] += 1
                            continue
                        assert ended.status == 0, ended
                        assert self.scenario.found(folder) == self.wanted
                        assert ended.err.count("results are not kept: ") <= 1
                        told = "results are not kept: " in ended.err
                        self.counts["ran without, and said so once" if told else "had room"] += 1
                        assert told or size > 0
        return self.counts


def _contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "filler"
    }
