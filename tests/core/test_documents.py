"""Files of documents, as people have them, and what is said about those that cannot be read."""

import gzip
import io
import json
import lzma
import sys
from types import SimpleNamespace

import pytest

from sparing import documents
from sparing.documents import read

TEXTS = ('A first text, with a comma and "quotes".', "Ein zweiter: äöü €", "third\tline")


def test_plain_text_has_a_document_on_each_line(tmp_path):
    path = tmp_path / "some.txt"
    path.write_text("\ufeffone\n\n  two  \r\nthree", encoding="utf-8")
    found = read([path])
    assert found.texts == ("one", "two", "three")
    assert (found.name, found.labels, found.empty) == ("some.txt", None, 0), "blank lines are no documents"
    assert read([path], whole=True).texts == ("one\n\n  two  \r\nthree",)
    assert read([path, path]).texts == found.texts * 2


def test_json_lines(tmp_path):
    path = tmp_path / "some.jsonl"
    path.write_text("\n".join(json.dumps({"text": t, "label": i, "other": None}) for i, t in enumerate(TEXTS)) + "\n\n")
    assert read([path]).texts == TEXTS
    assert read([path], label="label").labels == (0, 1, 2)
    path.write_text('{"body": "x"}\n{"body": ""}\n')
    assert read([path]).texts == ("x",), "the only column"


def test_comma_separated(tmp_path):
    path = tmp_path / "some.csv"
    path.write_text('id,text,label\n1,"A first text, with a comma and ""quotes"".",pos\n2,"two\nlines",neg\n', "utf-8")
    found = read([path], label="label")
    assert found.texts == (TEXTS[0], "two\nlines")
    assert found.labels == ("pos", "neg")
    assert read([path], column="id").texts == ("1", "2")
    path.write_text("text\n" + "x" * 500_000 + "\n")
    assert len(read([path]).texts[0]) == 500_000


def test_tab_separated_files_do_not_quote(tmp_path):
    path = tmp_path / "some.tsv"
    path.write_text('sentence\tlabel\n"half a quote\t1\nplain\t0\n')
    found = read([path], column="sentence", label="label")
    assert found.texts == ('"half a quote', "plain")
    assert found.labels == ("1", "0")


@pytest.mark.parametrize(("suffix", "pack"), [(".xz", lzma.compress), (".gz", gzip.compress), (".GZ", gzip.compress)])
def test_compressed_files_hold_the_same(tmp_path, suffix, pack):
    contents = {
        "some.jsonl": "\n".join(json.dumps({"text": text, "label": 1}) for text in TEXTS).encode(),
        "some.csv": b"text,label\none,1\n",
        "some.tsv": b"text\tlabel\none\t1\n",
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
        (tmp_path / (name + suffix)).write_bytes(pack(content))
        plain = read([tmp_path / name], label="label")
        packed = read([tmp_path / (name + suffix)], label="label")
        assert (packed.texts, packed.labels) == (plain.texts, plain.labels)
        assert packed.name == name + suffix
    (tmp_path / ("plain.txt" + suffix)).write_bytes(pack("eins\nzwei ü\n".encode()))
    assert read([tmp_path / ("plain.txt" + suffix)]).texts == ("eins", "zwei ü")


def test_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="an extra")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"text": list(TEXTS), "label": [0, 1, 2]}), tmp_path / "some.parquet")
    assert read([tmp_path / "some.parquet"], label="label") == documents.Documents("some.parquet", TEXTS, (0, 1, 2))
    parquet.write_table(pyarrow.table({"text": ["x", "y"], "label": [1, None]}), tmp_path / "null.parquet")
    with pytest.raises(ValueError, match=r"null.parquet, row 2 has no 'label'"):
        read([tmp_path / "null.parquet"], label="label")
    (tmp_path / "bad.parquet").write_text("no")
    with pytest.raises(ValueError, match=r"bad.parquet cannot be read as Parquet"):
        read([tmp_path / "bad.parquet"])
    with pytest.raises(ValueError, match=r"there is no file"):
        read([tmp_path / "none.parquet"])


def test_standard_input(monkeypatch):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO("eins\nzwei ü\n".encode())))
    found = read(["-"])
    assert (found.name, found.texts) == ("standard input", ("eins", "zwei ü"))


@pytest.mark.parametrize(
    ("name", "content", "options", "message"),
    [
        ("none.txt", None, {}, r"data: there is no file .*none.txt"),
        ("empty.txt", b"", {}, r"data: empty.txt holds no text"),
        ("blank.jsonl", b"\n\n", {}, r"data: blank.jsonl holds no text"),
        ("latin.txt", "gr\xfcn".encode("latin-1"), {}, r"latin.txt is not UTF-8 \(byte 2\); convert it first"),
        ("a.jsonl", b'{"text": "x"}\nno', {}, r"a.jsonl, line 2 is not JSON"),
        (
            "a.jsonl",
            b'{"text": "x"}\n\n' + b"[" * 200_000,
            {},
            r"a.jsonl, line 3 is not JSON: it is nested more than 64",
        ),
        ("a.jsonl", b'{"text": "x"}\n{"n": ' + b"9" * 10_000 + b"}", {}, r"line 2 is not JSON: .* thousands of digits"),
        (
            "a.jsonl",
            b'{"text": "x"}\n\n{"text": "a\\ud800b"}',
            {},
            r"a.jsonl, line 3: 'text' has half of a surrogate pair",
        ),
        ("a.jsonl", b"[1]", {}, r"a.jsonl, line 1 is list; each line must be an object"),
        ("a.jsonl", b'{"text": 3}', {}, r"a.jsonl, line 1: 'text' is int, not a text"),
        ("a.jsonl", b'{"a": "x", "b": "y"}', {}, r"a.jsonl has no column 'text'; it has 'a', 'b'"),
        ("a.jsonl", b'{"text": "x"}', {"label": "mark"}, r"a.jsonl has no label column 'mark'; it has 'text'"),
        ("a.jsonl", b'{"text": "x", "m": 1}\n{"text": "y"}', {"label": "m"}, r"a.jsonl, line 2 has no 'm'"),
        ("a.json", b'[{"text": "x"}]', {}, r"a.json is JSON; write one object per line and name the file .jsonl"),
        ("a.csv", b'text\n"open', {}, r"a.csv, line \d: unexpected end of data"),
        ("a.csv", b"text\nx", {"column": "body"}, r"a.csv has no column 'body'; it has 'text'"),
        ("a.csv", b"text\nx", {"whole": True}, r"a.csv is a table; --whole is for plain text"),
        ("a.txt", b"x", {"column": "body"}, r"a.txt is plain text and has no column 'body'; use .jsonl"),
        ("a.csv", b"text,m\nthe cat, said he,0", {}, r"a.csv, line 2 has more cells than the header has names"),
        ("a.txt", b"x", {"pair": "other"}, r"a.txt is plain text and has no second column 'other'"),
        ("a.jsonl", b'{"text": "x"}', {"pair": "other"}, r"a.jsonl has no column 'other'; it has 'text'"),
        ("a.jsonl", b'{"text": "x", "b": 1}', {"pair": "b"}, r"a.jsonl, line 1: 'b' is int, not a text"),
        ("a.jsonl", b'\n{"text": "x"}\n \n{"text": 3}', {}, r"a.jsonl, line 4: 'text' is int, not a text"),
        ("a.jsonl", b'{"text": "x", "m": 1}\n\n{"text": "y"}', {"label": "m"}, r"a.jsonl, line 3 has no 'm'"),
        ("a.csv", b'text,m\n"two\nlines",1\n\nx\n', {"label": "m"}, r"a.csv, line 5 has no 'm'"),
        (
            "a.jsonl.xz",
            lzma.compress(b'{"text": "x"}')[:-9],
            {},
            r"a.jsonl.xz cannot be unpacked: Compressed file ended",
        ),
        ("a.jsonl.xz", b"no", {}, r"a.jsonl.xz cannot be unpacked: \w"),
        (
            "a.csv.gz",
            gzip.compress(b"text\nx", mtime=0)[:-9],
            {},
            r"a.csv.gz cannot be unpacked: Compressed file ended",
        ),
        ("a.csv.gz", b"no", {}, r"a.csv.gz cannot be unpacked: Not a gzipped file"),
        ("a.txt.gz", gzip.compress(b"x" * 99, mtime=0)[:12] + b"!!!!!!!!!!!!", {}, r"a.txt.gz cannot be unpacked: \w"),
        ("a.txt.xz", lzma.compress("gr\xfcn".encode("latin-1")), {}, r"a.txt.xz is not UTF-8"),
        ("a.json.xz", lzma.compress(b"[]"), {}, r"a.json.xz is JSON; write one object per line"),
        ("a.parquet.xz", b"", {}, r"a.parquet.xz is Parquet in an archive; unpack it first"),
        ("none.txt.xz", None, {}, r"data: there is no file .*none.txt.xz"),
        ("a.txt", b"x", {"label": "mark"}, r"a.txt is plain text and has no label column 'mark'; use .jsonl"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, name, content, options, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read([tmp_path / name], **options)


@pytest.mark.parametrize(("suffix", "pack"), [("gz", gzip.compress), ("xz", lzma.compress)])
def test_files_that_unpack_to_more_than_fits_are_refused(tmp_path, monkeypatch, suffix, pack):
    monkeypatch.setattr(documents, "UNPACKED", 1000)
    path = tmp_path / f"a.txt.{suffix}"
    path.write_bytes(pack(b"x" * 1000))
    assert read([path]).texts == ("x" * 1000,)
    path.write_bytes(pack(b"x" * 10**6))
    with pytest.raises(ValueError, match=f"a.txt.{suffix} holds more than 1000 bytes; unpack it first"):
        read([path])


def test_a_surrogate_pair_is_a_character(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "\\ud83d\\ude00"}')
    assert read([tmp_path / "a.jsonl"]).texts == ("\U0001f600",)


def test_folders_and_no_files_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"data: .* is a folder; name the files in it"):
        read([tmp_path])
    with pytest.raises(ValueError, match="no file was given"):
        read([])


def test_a_fingerprint_is_that_of_texts_and_labels():
    one = documents.Documents("a", ("x", "y"))
    assert one.fingerprint == documents.Documents("b", ("x", "y")).fingerprint
    others = [
        documents.Documents("a", ("xy",)),
        documents.Documents("a", ("y", "x")),
        documents.Documents("a", ("x", "y"), (0, 1)),
    ]
    assert len({one.fingerprint, *(other.fingerprint for other in others)}) == 4


def test_every_machine_has_some():
    assert len(documents.default()) > 50


def test_pairs_of_texts(tmp_path):
    path = tmp_path / "pairs.tsv"
    path.write_text("score\ta\tb\n1.5\tone\ttwo\n2\tthree\t\n0\tfour\tfive\n")
    found = read([path], column="a", pair="b", label="score")
    assert (found.texts, found.pairs, found.labels) == (("one", "four"), ("two", "five"), ("1.5", "0"))
    assert found.empty == 1, "half a pair is none"
    assert found.fingerprint != read([path], column="a", label="score").fingerprint
