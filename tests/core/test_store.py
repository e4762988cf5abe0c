"""Files that are written whole, results that are kept, and what becomes of them on a bad disk."""

import json
import os
import warnings

import pytest
import torch

from sparing import store as stores
from sparing.store import Damaged, Store, StoreWarning, add_checksum, seal, unseal, verify_checksum, write_files
from sparing.workbench.cells import measured
from sparing.workbench.comparison.verdict import Comparison
from sparing_lab.training import checkpoint
from tests.support.comparisons import example

CELL = {"what": "square", "number": 12}
RESULT = {"value": 144, "root": 3.4641016151377544, "pair": [1, 2], "nothing": float("nan")}


def full(*args, **options):
    raise OSError(28, "No space left on device")


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "out.json"
    path.write_text("before")
    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*out\.json'"):
        write_files({path: "after"})
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]
    monkeypatch.undo()
    write_files({path: "after ü \udcff"})
    assert path.read_text(encoding="utf-8") == "after ü ?"
    assert path.stat().st_mode & 0o600 == 0o600


def test_of_two_files_both_are_written_or_none(tmp_path):
    one, two = tmp_path / "one", tmp_path / "none" / "two"
    one.write_text("before")
    with pytest.raises(OSError, match="none/two"):
        write_files({one: "after", two: "after"})
    assert one.read_text() == "before"
    assert list(tmp_path.iterdir()) == [one]


def test_a_link_is_followed(tmp_path):
    (tmp_path / "link").symlink_to("real")
    write_files({tmp_path / "link": "text"})
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "text"


def test_what_killed_processes_left_is_removed_once_it_is_old(tmp_path):
    old, new, other = (tmp_path / f".{name}.part" for name in ("x.json.1", "x.json.2", "y.json.3"))
    for path in (old, new, other):
        path.write_text("half")
    for path in (old, other):
        os.utime(path, (1e9, 1e9))
    write_files({tmp_path / "x.json": "whole"})
    assert sorted(tmp_path.iterdir()) == [new, other, tmp_path / "x.json"], "another file's is not touched"


# Kept results


@pytest.fixture
def kept(tmp_path):
    """A store that holds one result, and the file of it."""
    store = Store(tmp_path)
    store.put(CELL, RESULT)
    (path,) = tmp_path.iterdir()
    assert json.dumps(store.get(CELL)) == json.dumps(RESULT)
    assert store.get({**CELL, "number": 12.5}) is None
    return store, path


def changed(name, value):
    return lambda text: json.dumps({**json.loads(text), name: value})


def without(*names):
    return lambda text: json.dumps({name: value for name, value in json.loads(text).items() if name not in names})


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "", lambda text: "{", lambda text: "[]", lambda text: text[:-20], lambda text: "[" * 100_000,
        lambda text: text.replace("144", "145"), lambda text: text.replace('"root"', '"rooo"'), without("result"),
        without("cell"), without("format"), without("sha256"), without("sha256", "format"), changed("format", 3),
        changed("cell", {"number": 13}), changed("sha256", None), changed("result", 1),
        lambda text: json.dumps(add_checksum({"format": 2, "cell": {"number": 13}, "result": 1})),
        lambda text: json.dumps(add_checksum({"format": 2, "cell": CELL})),
        lambda text: json.dumps(add_checksum({"format": 2, "result": 1})),
        lambda text: json.dumps({"cell": CELL, "result": 1}),
    ],
)  # fmt: skip
def test_a_kept_result_that_is_damaged_is_measured_again(kept, damage, tmp_path):
    """The last is one of the format before, which had no checksum: it could not be told from a damaged one."""
    _, path = kept
    path.write_text(damage(path.read_text()))
    store = Store(tmp_path)
    with pytest.warns(StoreWarning, match=f"{path.name} is damaged or of an older version; such results are measured"):
        (found,) = measured([CELL], lambda cell: {"again": 1}, store)
    assert found == {"again": 1}
    assert Store(tmp_path).get(CELL) == {"again": 1}, "and kept"


def test_an_empty_folder_in_place_of_a_kept_result_is_replaced(kept, tmp_path):
    _, path = kept
    path.unlink()
    path.mkdir()
    with pytest.warns(StoreWarning, match=f"{path.name} is damaged or of an older version; such results") as told:
        assert measured([CELL], lambda cell: {"again": 1}, Store(tmp_path)) == [{"again": 1}]
    assert len(told) == 1
    assert measured([CELL], lambda cell: {"again": 2}, Store(tmp_path)) == [{"again": 1}], "kept, without a warning"


@pytest.mark.parametrize("link", [False, True])
def test_a_folder_in_place_of_a_kept_result_stays_and_is_named(kept, tmp_path, link):
    """A folder that holds something, or a link to a folder, is not ours to remove; other results are kept."""
    _, path = kept
    path.unlink()
    folder = tmp_path / "linked" if link else path
    folder.mkdir()
    (folder / "mine.txt").write_text("mine")
    if link:
        path.symlink_to(folder)
    other = {"number": 13}
    said = rf"{path.name} is a folder where a kept result must be a file, .*; move or delete the folder"
    for number in range(2):
        with pytest.warns(StoreWarning, match=said) as told:
            found = measured([CELL, other], lambda cell, number=number: number, Store(tmp_path))
        assert found == [number, 0]
        assert len(told) == 1
    assert (path / "mine.txt").read_text() == "mine"


def test_white_space_is_no_damage(kept):
    store, path = kept
    path.write_text(json.dumps(json.loads(path.read_text())))
    assert store.get(CELL)["value"] == 144


def test_damage_is_said_once(tmp_path):
    store = Store(tmp_path)
    cells = [{"number": i} for i in range(3)]
    measured(cells, lambda cell: 1, store)
    for path in tmp_path.iterdir():
        path.write_text("{}")
    with pytest.warns(StoreWarning) as told:
        assert measured(cells, lambda cell: 2, store) == [2, 2, 2]
    assert len(told) == 1


def test_a_store_that_cannot_be_written_to_is_an_error_where_it_was_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"cache: .*file is not a folder; name another folder"):
        Store(tmp_path / "file").prepare()
    with pytest.raises(ValueError, match=r"cache: .*inside cannot be written to \(Not a directory\); name another"):
        Store(tmp_path / "file" / "inside").prepare()
    monkeypatch.setattr("tempfile.TemporaryFile", full)
    with pytest.raises(ValueError, match=r"cannot be written to \(No space left on device\)"):
        Store(tmp_path / "new").prepare()


def test_a_store_that_cannot_be_written_to_is_told_once_where_nobody_named_it(tmp_path, monkeypatch, kept):
    monkeypatch.setattr("tempfile.TemporaryFile", full)
    monkeypatch.setattr(stores, "write_files", full)
    store = Store(tmp_path, optional=True)
    said = r"results are not kept: .* cannot be written to \(No space left on device\); name a folder with --cache"
    with pytest.warns(StoreWarning, match=said):
        store.prepare()
    assert measured([{"number": 1}, {"number": 2}], lambda cell: 5, store) == [5, 5], "no warning again"
    assert store.get(CELL)["value"] == 144, "what was kept before is still read"


def test_a_disk_that_fills_up_later_stops_nothing(tmp_path, monkeypatch):
    store = Store(tmp_path)
    store.prepare()
    monkeypatch.setattr("tempfile.mkstemp", full)
    with pytest.warns(StoreWarning, match=r"results are not kept: .* \(No space left on device\)") as told:
        assert measured([{"number": i} for i in range(3)], lambda cell: 5, store) == [5, 5, 5]
    assert len(told) == 1


# Checksums of what else is read back


def test_a_checksum_is_of_what_json_holds():
    held = {"b": (1, 2), "a": {1: "ü"}}
    again = json.loads(json.dumps(add_checksum(held)))
    assert verify_checksum(again) == {"b": [1, 2], "a": {"1": "ü"}}
    assert verify_checksum({"a": 1}) == {"a": 1}, "a file that somebody wrote by hand has none"
    with pytest.raises(Damaged, match="damaged or edited; restore it, or remove the entry 'sha256'"):
        verify_checksum({**again, "b": [1, 3]})


def test_only_temporary_files_of_results_are_removed_from_a_cache_folder(tmp_path):
    ours, theirs = tmp_path / f".{'0a' * 16}.json.tmp1.part", tmp_path / ".download.part"
    for path in (ours, theirs):
        path.write_text("half")
        os.utime(path, (0, 0))
    Store(tmp_path).prepare()
    assert not ours.exists()
    assert theirs.exists()


def test_lost_bytes_cannot_take_the_checksum_with_a_part_of_the_content(tmp_path):
    """All stretches of a comparison's last and first lines, which once held the checksum, and now do."""
    text = example(maps=(), rows=(), machine={}).to_json()
    wanted = Comparison.from_json(text)
    for start in range(len(text)):
        for end in range(start + 1, min(start + 160, len(text))):
            if start < 4 or end > len(text) - 4 or text[start - 1] == '"' or text[end] == '"':
                try:
                    found = Comparison.from_json(text[:start] + text[end:])
                except ValueError:
                    continue
                assert found == wanted, f"{text[start:end]!r} was lost"


def test_each_byte_of_a_sealed_file_counts():
    content = bytes(range(256))
    sealed = seal(content)
    assert unseal(sealed) == content
    for at in range(len(content)):
        with pytest.raises(Damaged):
            unseal(sealed[:at] + bytes([sealed[at] ^ 1]) + sealed[at + 1 :])
    for length in range(1, len(sealed)):
        try:
            assert unseal(sealed[:-length]) == sealed[:-length], "what is cut has no seal"
        except Damaged:
            assert length < 66


def test_a_checkpoint_without_a_seal_is_read(tmp_path):
    """As those of the versions before are; their parts have checksums of their own."""
    held = {"config": {}, "fingerprint": "", "examples": "", "model": {"w": torch.arange(3.0)}, "step": 3, "records": [],
            "task": "x"}  # fmt: skip
    path = tmp_path / "best.pt"
    checkpoint.save(path, held)
    sealed = path.read_bytes()
    path.write_bytes(unseal(sealed))
    assert len(path.read_bytes()) < len(sealed)
    assert checkpoint.load(path)["step"] == 3
    assert torch.load(path, weights_only=True)["step"] == 3


def test_warnings_are_silent_where_all_is_well(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store = Store(tmp_path / "new", optional=True)
        store.prepare()
        measured([CELL], lambda cell: 1, store)
        assert measured([CELL], lambda cell: 2, Store(tmp_path / "new")) == [1]
