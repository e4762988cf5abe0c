"""Encoders without padding: the same outputs on valid tokens, for every family and any lengths; packs that users pass."""

import copy
import pickle
import threading

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import sparing
from sparing import Unsupported
from sparing.transformers.find import find
from sparing.transformers.packing import ENCODERS, is_packing
from sparing.transformers.runtime.function import attention_function
from tests.support.model_zoo import CONFIGS, SMALL, TOKENS

#: Each encoder with a head, so that poolers and heads run on padded outputs as ever.
MODELS = {
    "BertModel": ("BertForSequenceClassification", CONFIGS["bert"][1]),
    "CamembertModel": ("CamembertForTokenClassification", lambda: transformers.CamembertConfig(**TOKENS, **SMALL)),
    "DistilBertModel": ("DistilBertForMaskedLM", CONFIGS["distilbert"][1]),
    "ElectraModel": (
        "ElectraForSequenceClassification",
        lambda: transformers.ElectraConfig(**TOKENS, **SMALL, embedding_size=32),
    ),
    "MPNetModel": ("MPNetForSequenceClassification", CONFIGS["mpnet"][1]),
    "ModernBertModel": ("ModernBertForSequenceClassification", CONFIGS["modernbert"][1]),
    "RobertaModel": ("RobertaForSequenceClassification", CONFIGS["roberta"][1]),
    "XLMRobertaModel": ("XLMRobertaForTokenClassification", lambda: transformers.XLMRobertaConfig(**TOKENS, **SMALL)),
}


def model_of(encoder, *, head=True):
    name, config = MODELS[encoder]
    torch.manual_seed(0)
    return getattr(transformers, name if head else encoder)(config()).eval()


def batch(lengths, longest=None, left=()):
    """Token ids and mask of texts of these lengths; left: items that are padded on the left."""
    n = longest or max(lengths)
    ids, mask = torch.zeros(len(lengths), n, dtype=torch.long), torch.zeros(len(lengths), n, dtype=torch.long)
    gen = torch.Generator().manual_seed(sum(lengths))
    for item, length in enumerate(lengths):
        at = slice(n - length, n) if item in left else slice(0, length)
        ids[item, at], mask[item, at] = torch.randint(3, 100, (length,), generator=gen), 1
    return {"input_ids": ids, "attention_mask": mask}


def hooks_of(model):
    """The hooks that remove padding. transformers has its own, for hidden states."""
    found = [
        hook for part in model.modules() for hook in (*part._forward_hooks.values(), *part._forward_pre_hooks.values())
    ]
    return [hook for hook in found if is_packing(hook)]


def test_every_family_is_tested():
    assert set(MODELS) == set(ENCODERS)


@pytest.mark.parametrize("encoder", ENCODERS)
@torch.no_grad()
def test_outputs_are_those_of_the_padded_model(encoder):
    model, given = model_of(encoder), batch([20, 3, 1, 13], longest=24)
    wanted = model(**given, output_hidden_states=True)
    seen = []
    watch = find(model)[-1].module.register_forward_hook(lambda module, args, out: seen.append(tuple(out[0].shape[:2])))
    with sparing.approximate(model, "exact", padding="remove") as handle:
        found = model(**given)
        direct = model.forward(**given, output_hidden_states=True)
        shown = repr(handle)
    assert "the padding of batches is removed" in shown
    watch.remove()
    assert seen == [(1, 37), (4, 24)], "valid tokens alone, but padded where the hidden states of all layers are wanted"
    valid = given["attention_mask"].bool()
    by_token = found.logits.ndim == 3
    assert torch.allclose(*(x.logits[valid] if by_token else x.logits for x in (found, wanted)), atol=1e-5)
    for a, b in zip(direct.hidden_states, wanted.hidden_states, strict=True):
        assert a.shape == b.shape
        assert torch.allclose(a[valid], b[valid], atol=1e-5)
    again = model(**given)
    assert torch.equal(again.logits, wanted.logits), "restored"
    assert hooks_of(model) == []


@pytest.mark.parametrize("encoder", ["BertModel", "MPNetModel", "ModernBertModel"])
@settings(max_examples=25, suppress_health_check=[HealthCheck.differing_executors], deadline=None)
@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=5).filter(any), extra=st.integers(0, 3), data=st.data()
)
@torch.no_grad()
def test_any_lengths(encoder, lengths, extra, data):
    model = _KEPT.setdefault(encoder, model_of(encoder, head=False))
    left = data.draw(st.sets(st.integers(0, len(lengths) - 1)))
    given = batch(lengths, longest=max(lengths) + extra, left=left)
    wanted = model(**given).last_hidden_state
    with sparing.approximate(model, "exact", padding="remove"):
        found = model(**given).last_hidden_state
    valid = given["attention_mask"].bool()
    assert torch.allclose(found[valid], wanted[valid], atol=1e-5)
    if not bool(valid.all()):
        assert bool((found[~valid] == 0).all())


_KEPT: dict[str, torch.nn.Module] = {}


@torch.no_grad()
def test_however_the_model_is_called():
    model, given, seen = model_of("BertModel", head=False), batch([20, 3, 1]), []
    model.encoder.layer[1].intermediate.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape))
    with sparing.approximate(model, "exact", padding="remove"):
        model(given["input_ids"], given["attention_mask"])
        model.forward(**given)
        model(**given, return_dict=False)
        model(input_ids=given["input_ids"][:1])
    model(**given)
    assert [tuple(shape) for shape in seen] == [(1, 24, 64)] * 3 + [(1, 20, 64), (3, 20, 64)]


@pytest.mark.parametrize(
    "spec", ["window(size=4)", "nystrom(landmarks=4)", "key_clusters(keys=8)", "monte_carlo(alpha=0.5)"]
)
@torch.no_grad()
def test_methods_run_on_each_text_alone(spec):
    model, lengths = model_of("BertModel", head=False), [20, 3, 13]
    given = batch(lengths)
    with sparing.approximate(model, spec, padding="remove") as handle:
        found = model(**given).last_hidden_state
        counted = handle.statistics().total
    with sparing.approximate(model, spec):
        for item, length in enumerate(lengths):
            alone = model(input_ids=given["input_ids"][item : item + 1, :length]).last_hidden_state
            assert torch.allclose(found[item, :length], alone[0], atol=1e-5)
    assert counted.calls == 2, "one for each layer, however many texts"
    assert counted.tally.tokens == counted.tally.positions == 2 * sum(lengths), "no padding"


@torch.no_grad()
def test_local_layers_keep_their_windows():
    model, given = model_of("ModernBertModel", head=False), batch([30, 4])
    with sparing.approximate(model, "nystrom(landmarks=64)", padding="remove") as handle:
        found = model(**given).last_hidden_state[0]
        assert handle.layers == {"layers.0.attn": "nystrom(landmarks=64)", "layers.1.attn": "exact"}
    wanted = model(**given).last_hidden_state[0]
    assert torch.allclose(found, wanted, atol=1e-4)


def test_gradients_are_those_of_the_padded_model():
    model, given = model_of("BertModel"), batch([20, 3, 13])
    given["labels"] = torch.tensor([0, 1, 0])
    wanted = torch.autograd.grad(model(**given).loss, list(model.parameters()), allow_unused=True)
    with sparing.approximate(model, "exact", padding="remove"):
        found = torch.autograd.grad(model(**given).loss, list(model.parameters()), allow_unused=True)
    for a, b in zip(found, wanted, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.allclose(a, b, atol=1e-5)


def test_gradient_checkpointing_keeps_the_padding():
    model, given = model_of("BertModel").train(), batch([20, 3, 13])
    for part in model.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
    model.gradient_checkpointing_enable()
    with sparing.approximate(model, "exact", padding="remove"):
        model(**given).logits.sum().backward()
    assert all(p.grad is not None for p in model.bert.encoder.parameters())


@torch.no_grad()
def test_threads_and_copies_have_batches_of_their_own():
    model = model_of("BertModel", head=False)
    inputs = [batch(lengths) for lengths in ([20, 3], [5, 17, 2], [9, 1])]
    wanted = [model(**each).last_hidden_state for each in inputs]
    with sparing.approximate(model, "exact", padding="remove"):
        others = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        found = {}

        def run(number):
            for _ in range(5):
                found[number] = model(**inputs[number]).last_hidden_state

        threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        results = [*((found[i], i) for i in range(3)), *((each(**inputs[0]).last_hidden_state, 0) for each in others)]
    for got, number in results:
        valid = inputs[number]["attention_mask"].bool()
        assert torch.allclose(got[valid], wanted[number][valid], atol=1e-5)
    sparing.restore(others[0])
    assert torch.equal(others[0](**inputs[0]).last_hidden_state, wanted[0])


@torch.no_grad()
def test_an_error_in_a_batch_leaves_nothing_behind():
    model, given = model_of("BertModel", head=False), batch([20, 3])
    wanted = model(**given).last_hidden_state
    with sparing.approximate(model, "exact", padding="remove"):
        failing = model.encoder.layer[1].register_forward_pre_hook(lambda module, args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(**given)
        failing.remove()
        found = model.encoder(torch.randn(2, 20, 64)).last_hidden_state
        assert found.shape == (2, 20, 64), "the encoder alone, which nobody told of a mask"
        again = model(**given).last_hidden_state
    valid = given["attention_mask"].bool()
    assert torch.allclose(again[valid], wanted[valid], atol=1e-5)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("vit", "ViTModel reads images, which have no padding; use padding='keep'"),
        ("gpt2", r"transformer\.h\.0\.attn is in GPT2Model, whose other layers may look at the batch too"),
        ("bart", "is in BartEncoder"),
        ("nystromformer", "is in NystromformerModel"),
    ],
)
def test_other_models_are_refused_by_name(name, message):
    kind, config = CONFIGS[name]
    model = getattr(transformers, kind)(config())
    with pytest.raises(Unsupported, match=message):
        sparing.approximate(model, "exact", padding="remove")
    assert hooks_of(model) == []


def test_settings_that_make_no_sense_are_refused():
    model = model_of("BertModel")
    with pytest.raises(ValueError, match="padding='drop' is not one of 'keep', 'remove'"):
        sparing.approximate(model, "exact", padding="drop")
    model.config.chunk_size_feed_forward = 4
    with pytest.raises(Unsupported, match="chunk_size_feed_forward"):
        sparing.approximate(model, "exact", padding="remove")
    decoder = transformers.BertModel(transformers.BertConfig(**TOKENS, **SMALL, is_decoder=True))
    with pytest.raises(Unsupported, match="it is causal; use padding='keep'"):
        sparing.approximate(decoder, "exact", padding="remove")


@pytest.mark.parametrize("spec", ["exact", "window(size=4)", "multipole(tolerance=0.0)"])
@pytest.mark.parametrize("marked", ["flash", "positions", "both"])
@torch.no_grad()
def test_packs_that_the_user_passes_are_texts_of_their_own(spec, marked):
    """As `DataCollatorWithFlattening` makes them for flash attention."""
    kind, config = CONFIGS["llama"]
    torch.manual_seed(0)
    model = getattr(transformers, kind)(config()).eval()
    texts = [{"input_ids": torch.randint(3, 100, (n,)).tolist()} for n in (12, 1, 20)]
    collate = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=marked != "positions")
    given = {name: part for name, part in collate(texts).items() if name != "labels"}
    if marked == "flash":
        given.pop("position_ids")
        given["position_ids"] = torch.arange(33)[None]  # rotary positions are relative: nothing depends on the start
    with sparing.approximate(model, spec, when="prefill"):
        found = model(**given, use_cache=False).logits[0].split([12, 1, 20])
        for part, text in zip(found, texts, strict=True):
            alone = model(torch.tensor([text["input_ids"]]), use_cache=False).logits[0]
            assert torch.allclose(part, alone, atol=1e-4)


@torch.no_grad()
def test_packs_are_not_lost_where_they_cannot_be_read(monkeypatch):
    """A graph does not read offsets, and one bias of all positions is not that of each sequence: both are refused."""
    offsets = torch.tensor([0, 5, 12], dtype=torch.int32)
    flash = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 7, "max_length_k": 7}
    kind, config = CONFIGS["llama"]
    model = getattr(transformers, kind)(config()).eval()
    query = torch.randn(1, 4, 12, 16)
    for spec in ("window(size=4)", "exact"):
        with sparing.approximate(model, spec):
            layer = find(model)[0].module
            with pytest.raises(Unsupported, match="packed sequences have no common position bias"):
                attention_function(layer, query, query, query, None, position_bias=torch.zeros(1, 4, 12, 12), **flash)
            with monkeypatch.context() as patched:
                patched.setattr(torch.compiler, "is_compiling", lambda: True)
                with pytest.raises(Unsupported, match="the model passes cu_seq_lens_q"):
                    attention_function(layer, query, query, query, None, **flash)


@torch.no_grad()
def test_a_mask_that_was_read_is_read_again_for_other_offsets():
    kind, config = CONFIGS["llama"]
    model = getattr(transformers, kind)(config()).eval()
    query, numbers = torch.randn(1, 4, 12, 16), torch.arange(12) >= 5
    mask = (numbers[:, None] == numbers).tril()[None, None]
    right, wrong = (torch.tensor(each, dtype=torch.int32) for each in ([0, 5, 12], [0, 6, 12]))
    with sparing.approximate(model, "window(size=4)"):
        layer = find(model)[0].module
        attention_function(layer, query, query, query, mask, cu_seq_lens_q=right, cu_seq_lens_k=right)
        with pytest.raises(Unsupported, match="a mask that hides other tokens"):
            attention_function(layer, query, query, query, mask, cu_seq_lens_q=wrong, cu_seq_lens_k=wrong)


@torch.no_grad()
def test_packs_that_contradict_themselves_are_refused():
    kind, config = CONFIGS["llama"]
    model = getattr(transformers, kind)(config()).eval()
    ids, offsets = torch.randint(3, 100, (1, 12)), torch.tensor([0, 5, 12], dtype=torch.int32)
    flash = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 7, "max_length_k": 7}
    with sparing.approximate(model, "window(size=4)"):
        with pytest.raises(Unsupported, match="cu_seq_lens_q and cu_seq_lens_k differ"):
            model(ids, **{**flash, "cu_seq_lens_k": torch.tensor([0, 6, 12])}, use_cache=False)
        with pytest.raises(Unsupported, match="a mask that hides other tokens; leave out attention_mask"):
            model(ids, attention_mask=torch.tensor([[0] * 3 + [1] * 9]), **flash, use_cache=False)
        wrong = torch.tensor([0, 5, 11], dtype=torch.int32)
        with pytest.raises(ValueError, match=r"cu_seqlens=\[0, 5, 11\] must begin with 0 and end with the total, 12"):
            model(ids, **{**flash, "cu_seq_lens_q": wrong, "cu_seq_lens_k": wrong}, use_cache=False)
