"""Stacks and models: masks, causality, positions, and that a method is a one-word change."""

import pytest
import torch

import sparing
from sparing import Unsupported
from sparing.nn import CausalLM, Classifier, Decoder, DualTower, Encoder, MaskedLM, MultiheadAttention, Pretraining

TRAINED = [
    "exact", "yoso(hashes=8)", "skyformer(landmarks=8)", "linformer(rank=8)", "nystrom(landmarks=8)", "kernelized",
    "kernel(kind=elu)", "window(size=4)", "lsh(rounds=2, chunk=4)", "random_features(features=16)",
]  # fmt: skip
CAUSAL = [
    "exact",
    "yoso(hashes=8)",
    "kernel(kind=elu)",
    "kernel(kind=poly)",
    "window(size=4)",
    "lsh(rounds=2, chunk=4)",
]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def tokens(batch=3, n=12):
    return torch.randint(20, (batch, n))


@pytest.mark.parametrize("method", TRAINED)
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_every_parameter_of_a_classifier_learns_with_any_method(method, norm):
    model = Classifier(Encoder(20, length=16, width=16, method=method, norm=norm), classes=4)
    model(tokens()).logsumexp(-1).sum().backward()
    still = [name for name, p in model.named_parameters() if p.grad is None or not bool(p.grad.abs().sum() > 0)]
    # A softmax does not see what is added to all keys, and the last readout's bias shifts all classes.
    assert all("in_proj_bias" in name or name == "encoder.norm.bias" for name in still), still


@pytest.mark.parametrize("method", TRAINED)
def test_what_stands_at_padding_changes_nothing(method):
    model = Classifier(Encoder(20, length=16, width=16, method=method), classes=4).eval()
    given = tokens()
    mask = torch.arange(12) < torch.tensor([[5], [12], [8]])
    other = torch.where(mask, given, (given + 7) % 20)
    torch.testing.assert_close(model(given, mask), model(other, mask), rtol=0, atol=0)
    assert not torch.equal(model(given), model(other))  # the control: without the mask it does


def test_padding_rows_are_zero_and_leave_the_mean_alone():
    encoder = Encoder(20, length=16, width=16).eval()
    given = tokens(1)
    longer = torch.cat([given, torch.zeros(1, 4, dtype=torch.long)], dim=1)
    mask = torch.arange(16)[None] < 12
    states = encoder(longer, mask)
    assert not states[:, 12:].any()
    torch.testing.assert_close(states[:, :12], encoder(given))
    model = Classifier(encoder, classes=3).eval()
    torch.testing.assert_close(model(longer, mask), model(given))


@pytest.mark.parametrize("method", CAUSAL)
def test_a_decoder_sees_nothing_that_comes_later(method):
    model = CausalLM(Decoder(20, length=16, width=16, method=method)).eval()
    given = tokens()
    later = given.clone()
    later[:, 7:] = (later[:, 7:] + 5) % 20
    torch.testing.assert_close(model(given)[:, :7], model(later)[:, :7], rtol=0, atol=1e-6)
    assert not torch.equal(model(given)[:, 7:], model(later)[:, 7:])


def test_an_encoder_does_see_what_comes_later():
    model = MaskedLM(Encoder(20, length=16, width=16)).eval()
    given = tokens()
    later = given.clone()
    later[:, 11] = (later[:, 11] + 5) % 20
    assert not torch.equal(model(given)[:, 0], model(later)[:, 0])


def test_towers_share_their_encoder_and_tell_the_texts_apart():
    model = DualTower(Encoder(20, length=16, width=16)).eval()
    a, b = tokens(), tokens(n=9)
    assert model(a, b).shape == (3, 2)
    assert not torch.allclose(model(a, b[:, :]), model(b, a))
    mask = torch.ones(3, 12, dtype=torch.bool)
    torch.testing.assert_close(model(a, b, mask), model(a, b))


def test_pretraining_reads_segments_and_answers_both_questions():
    model = Pretraining(Encoder(20, length=16, width=16, segments=2)).eval()
    given = tokens()
    first, second = torch.zeros_like(given), torch.ones_like(given)
    found = model(given, segments=first)
    assert found.tokens.shape == (3, 12, 20)
    assert found.order.shape == (3, 2)
    assert not torch.equal(found.order, model(given, segments=second).order)
    with pytest.raises(ValueError, match="has no segment embeddings"):
        MaskedLM(Encoder(20, length=16, width=16))(given, segments=first)


def test_layers_may_differ():
    encoder = Encoder(20, length=16, width=16, layers=2, method=["exact", "window(size=4)"])
    assert [layer.attention.method.name for layer in encoder.layers] == ["exact", "window"]
    with pytest.raises(ValueError, match="3 of them for layers=2"):
        Encoder(20, length=16, layers=2, method=["exact"] * 3)


def test_positions_are_repeated():
    encoder = Encoder(20, length=8, width=16).eval()
    given = tokens(1, 8)
    before = encoder(given)
    encoder.extend_positions(20)
    assert encoder.length == 20
    torch.testing.assert_close(encoder(given), before, rtol=0, atol=0)
    torch.testing.assert_close(encoder.positions.weight[8:16], encoder.positions.weight[:8])
    assert encoder.positions.weight.requires_grad
    assert encoder(tokens(1, 20)).shape == (1, 20, 16)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Encoder(20, length=8)(torch.zeros(1, 9, dtype=torch.long)), "9 are more than length=8"),
        (lambda: Encoder(0, length=8), "vocabulary=0"),
        (lambda: Encoder(20, length=8, norm="none"), "norm='none' is not one of"),
        (lambda: Encoder(20, length=8).extend_positions(4), "length=4 is less than the 8"),
        (lambda: CausalLM(Encoder(20, length=8)), "its layers see later tokens"),
    ],
)
def test_bad_input(make, said):
    with pytest.raises(ValueError, match=said):
        make()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Decoder(20, length=8, method="skyformer"), "cannot be causal"),
        (lambda: Encoder(20, length=8, method="top_keys"), "has no gradient"),
        (lambda: Encoder(20, length=8, method="linformer(rank=4)").extend_positions(16), "a projection of its length"),
    ],
)
def test_what_a_method_cannot_do_is_refused_before_the_first_step(make, said):
    with pytest.raises(Unsupported, match=said):
        make()


def test_the_bits_of_yoso_are_those_of_the_longest_input():
    """The paper sets tau once, from the model's maximum length."""
    torch.manual_seed(1)
    model, fixed = (
        Encoder(20, length=64, width=16, method=f"yoso(hashes=8{bits})").eval() for bits in ("", ", bits=6")
    )
    fixed.load_state_dict(model.state_dict())
    for n in (5, 12, 64):
        given = tokens(2, n)
        torch.testing.assert_close(model(given), fixed(given), rtol=0, atol=0)
    assert str(model.layers[0].attention.method) == "yoso(hashes=8)"
    given = tokens(2, 12)
    before = model(given)
    model.extend_positions(1000)
    for layer in fixed.layers:
        layer.attention.method = sparing.method("yoso(hashes=8, bits=10)")
    assert not torch.equal(model(given), before)
    assert torch.equal(model(given), fixed(given))


def test_a_layer_that_states_no_length_takes_the_bits_of_its_keys():
    torch.manual_seed(1)
    made = [
        MultiheadAttention(16, 2, batch_first=True, method=f"yoso(hashes=8{bits})", max_length=longest, seed=0)
        for bits, longest in (("", None), (", bits=4", None), ("", 64))
    ]
    for layer in made[1:]:
        layer.load_state_dict(made[0].state_dict())
    x = torch.randn(2, 12, 16)
    bare, four, long = (layer(x, x, x)[0] for layer in made)
    assert torch.equal(bare, four)
    assert not torch.equal(bare, long)
    compiled = torch.compile(made[2], backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x, x, x)[0], long)
