"""Long documents with classes, from files made here, and a model that reads them within a window."""

import json
import lzma

import pytest
import torch

from sparing.models import Subject
from sparing_lab.tasks import articles
from sparing_lab.tasks.longformer import from_bert

IMDB, AAPD = articles.COLLECTIONS["imdb"], articles.COLLECTIONS["aapd"]


def lines(*rows):
    return "\n".join(json.dumps(row) for row in rows).encode()


def test_json_lines_packed_or_not(tmp_path):
    content = lines({"text": "good", "label": 1, "rating": 9}, {"text": "bad", "label": "0"})
    for folder, name, packed in (
        ("imdb", "test_5k.jsonl.xz", lzma.compress(content)), ("hyperpartisan", "train.jsonl", content),
    ):  # fmt: skip
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_bytes(packed)
        found = articles.load(articles.COLLECTIONS[folder], tmp_path)
        assert (found.texts, found.labels, found.name) == (("good", "bad"), (1, 0), name)
    assert [each.title for each in articles.given(tmp_path)] == ["HND", "IMDB"]


def test_the_test_set_comes_before_the_training_set(tmp_path):
    (tmp_path / "imdb").mkdir()
    for name in ("a_train.jsonl", "test.jsonl"):
        (tmp_path / "imdb" / name).write_bytes(lines({"text": name, "label": 0}))
    assert articles.load(IMDB, tmp_path).texts == ("test.jsonl",)


def test_rows_of_bits(tmp_path):
    (tmp_path / "aapd").mkdir()
    (tmp_path / "aapd" / "test.tsv").write_text("0110\tgraphs and , trees\n\n0001\tlogic\n")
    found = articles.load(AAPD, tmp_path)
    assert found.texts == ("graphs and , trees", "logic")
    assert found.labels == ((0, 1, 1, 0), (0, 0, 0, 1))


@pytest.mark.parametrize(
    ("folder", "name", "content", "message"),
    [
        ("imdb", "test.jsonl", b"\n" + lines({"text": "", "label": 1}, {"text": "x", "label": 2}), r"test.jsonl, line 3: 'label' is 2; it must be 0 or 1"),
        ("imdb", "test.jsonl", lines({"text": "x"}), r"has no label column 'label'"),
        ("imdb", "test.jsonl", lines({"body": "x", "label": 1}), r"has no column 'text'; it has 'body', 'label'"),
        ("imdb", "test.jsonl.xz", lzma.compress(lines({"text": "x"}))[:-8], r"cannot be unpacked: Compressed file ended"),
        ("aapd", "test.tsv", b"01\tx\nlogic\n", r"test.tsv, line 2 is not a row of 0 and 1, a tab and a text"),
        ("aapd", "test.tsv", b"01\tx\n01\n", r"test.tsv, line 2 is not a row"),
        ("aapd", "test.tsv", b"01\tx\n011\ty\n", r"test.tsv, line 2 has 3 classes, but line 1 has 2"),
        ("aapd", "test.tsv", b"\n", r"test.tsv holds no text"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_named(tmp_path, folder, name, content, message):
    (tmp_path / folder).mkdir()
    (tmp_path / folder / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        articles.load(articles.COLLECTIONS[folder], tmp_path)


@pytest.mark.parametrize("name", list(articles.COLLECTIONS))
def test_a_missing_collection_says_what_it_wants(tmp_path, name):
    collection = articles.COLLECTIONS[name]
    for data in (tmp_path, None):
        with pytest.raises(ValueError, match=rf"needs .*{name}/test\.\w+ \(.*The paper had it from") as error:
            articles.load(collection, data)
        assert collection.form in str(error.value)
        assert collection.source in str(error.value)
        assert "\n" not in str(error.value)


def small_bert():
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    torch.manual_seed(0)
    model = BertModel(BertConfig(**sizes, vocab_size=50, max_position_embeddings=24), add_pooling_layer=False).eval()
    for name, weight in model.named_parameters():
        if "attention" in name and "LayerNorm" not in name:
            weight.data *= 20  # so that it matters which keys are seen
    return Subject("bert", model, None)


@torch.no_grad()
def test_a_window_over_bert_is_bert_with_a_mask():
    subject = small_bert()
    ids = torch.randint(1, 50, (40,))
    found = from_bert(subject, window=8, length=40).run(ids).last_hidden_state[0]
    place = torch.arange(40)
    seen = (place - place[:, None]).abs() <= 4
    seen[0] = seen[:, 0] = True

    def dense(mask):
        from sparing.transformers.positions import extend_positions

        model = extend_positions(small_bert().model, 40)
        bias = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
        return model(input_ids=ids[None], attention_mask=bias[None, None]).last_hidden_state[0]

    torch.testing.assert_close(found, dense(seen), rtol=1e-4, atol=1e-4)
    narrow = (place - place[:, None]).abs() <= 3  # control
    narrow[0] = narrow[:, 0] = True
    assert not torch.allclose(found, dense(narrow), atol=1e-2)
    assert subject.model.config.max_position_embeddings == 24, "the model was changed"


def test_only_bert_becomes_a_longformer():
    with pytest.raises(ValueError, match="other is a Linear; only a BertModel becomes a Longformer"):
        from_bert(Subject("other", torch.nn.Linear(2, 2), None), window=8, length=16)
