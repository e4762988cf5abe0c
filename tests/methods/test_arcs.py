"""Arcs of sorted keys: which keys a query looks at, written out token by token; blocks hold the same pairs."""

import pytest
import torch
from torch import Tensor

from sparing.methods.lsh import arcs


def buckets(n: int, how_many: int, seed: int) -> Tensor:
    return torch.randint(how_many, (2, 3, n), generator=torch.Generator().manual_seed(seed))


def tokens(keep: Tensor | None, n_k: int, chunk: int) -> arcs.Tokens:
    valid = torch.tensor([n_k]) if keep is None else keep.sum(-1)
    return arcs.Tokens(keep, keep, valid, chunk)


def hits(found: arcs.Round, shared: arcs.Tokens) -> Tensor:
    """(B, H, n_q, n_k) boolean."""
    seen = found.sees(None, None, shared.valid)
    return seen if shared.keep is None else seen & shared.keep[:, None, None, :]


def sorted_tokens(in_bucket: list[int], valid: list[bool]) -> list[int]:
    return sorted((j for j in range(len(in_bucket)) if valid[j]), key=lambda j: (in_bucket[j], j))


def each_head(in_q: Tensor, in_k: Tensor, keep: Tensor | None):
    for b in range(in_q.shape[0]):
        for h in range(in_q.shape[1]):
            valid = [True] * in_k.shape[-1] if keep is None else keep[b].tolist()
            yield b, h, in_q[b, h].tolist(), in_k[b, h].tolist(), valid


KEEPS = {
    "all": None,
    "holes": torch.rand(2, 41, generator=torch.Generator().manual_seed(3)) < 0.7,
    "one": torch.stack([torch.arange(41) == 7, torch.arange(41) < 20]),
    "none": torch.stack([torch.arange(41) < 0, torch.arange(41) >= 0]),
}


@pytest.mark.parametrize("chunk", [1, 4, 7, 20, 64])
@pytest.mark.parametrize("keep", KEEPS.values(), ids=KEEPS)
def test_rank_chunks_see_their_own_and_the_previous_chunk(keep, chunk):
    in_q, in_k = buckets(41, 6, 0), buckets(41, 6, 1)
    shared = tokens(keep, 41, chunk)
    found = hits(arcs.by_rank(in_q, in_k, shared), shared)
    for b, h, of_q, of_k, valid in each_head(in_q, in_k, keep):
        keys = sorted_tokens(of_k, valid)
        chunks = [set(keys[i : i + chunk]) for i in range(0, len(keys), chunk)]
        for rank, i in enumerate(sorted_tokens(of_q, valid)):
            c = rank // chunk
            wanted = chunks[c] | chunks[c - 1]  # chunk 0 wraps around to the last one
            assert set(found[b, h, i].nonzero().flatten().tolist()) == wanted


@pytest.mark.parametrize("chunk", [1, 3, 8, 20, 64])
@pytest.mark.parametrize("keep", KEEPS.values(), ids=KEEPS)
def test_causal_arcs_hold_the_last_keys_of_the_bucket(keep, chunk):
    in_q, in_k = buckets(41, 4, 0), buckets(41, 4, 1)
    shared = tokens(keep, 41, chunk)
    found = hits(arcs.by_bucket_causal(in_q, in_k, shared), shared)
    for b, h, of_q, of_k, valid in each_head(in_q, in_k, keep):
        for i in range(41):
            past = [j for j in range(i + 1) if valid[j] and of_k[j] == of_q[i]]
            last = max(len(past) - 1, 0) // chunk
            assert found[b, h, i].nonzero().flatten().tolist() == past[max(last - 1, 0) * chunk :]


@pytest.mark.parametrize("n_q", [41, 30])
@pytest.mark.parametrize("chunk", [2, 8, 20, 64])
@pytest.mark.parametrize("keep", KEEPS.values(), ids=KEEPS)
def test_bucket_arcs_surround_the_bucket(keep, chunk, n_q):
    in_q, in_k = buckets(n_q, 5, 0), buckets(41, 4, 1)  # nobody is in bucket 4
    shared = tokens(keep, 41, chunk)
    wide = hits(arcs.by_bucket(in_q, in_k, shared, strict=False), shared)
    strict = hits(arcs.by_bucket(in_q, in_k, shared, strict=True), shared)
    for b, h, of_q, of_k, valid in each_head(in_q, in_k, keep):
        keys = sorted_tokens(of_k, valid)
        for i in range(n_q):
            own = {j for j in keys if of_k[j] == of_q[i]}
            seen = set(wide[b, h, i].nonzero().flatten().tolist())
            places = sorted(keys.index(j) for j in seen)
            assert len(seen) == min(2 * chunk, len(keys))
            assert places == list(range(places[0], places[0] + len(seen))) if seen else not keys
            assert set(strict[b, h, i].nonzero().flatten().tolist()) == seen & own
            if len(own) <= 2 * chunk - (chunk + 1) // 2:
                assert own <= seen
            elif len(own) > 2 * chunk and n_q == 41 and i in own and chunk > 1:
                assert i in seen, "of a large bucket, the neighbourhood of the query"


def does_not_look_ahead(rule, upto: int = 20) -> None:
    """Which keys a query sees does not depend on the buckets of later tokens."""
    in_q, in_k = buckets(41, 4, 0), buckets(41, 4, 1)
    shared = tokens(None, 41, 3)
    past = torch.ones(41, 41, dtype=torch.bool).tril()
    before = hits(rule(in_q, in_k, shared), shared) & past
    for seed in range(5):
        later = torch.arange(41) >= upto
        in_q2, in_k2 = (torch.where(later, buckets(41, 4, 10 + seed), x) for x in (in_q, in_k))
        after = hits(rule(in_q2, in_k2, shared), shared) & past
        assert torch.equal(after[:, :, :upto], before[:, :, :upto])


def test_only_the_causal_rule_does_not_look_ahead():
    does_not_look_ahead(arcs.by_bucket_causal)
    for rule in (arcs.by_rank, lambda *a: arcs.by_bucket(*a, strict=False), lambda *a: arcs.by_bucket(*a, strict=True)):
        with pytest.raises(AssertionError):  # controls: masking the future afterwards is not enough
            does_not_look_ahead(rule)


def test_padded_queries_take_no_rank():
    def unmoved(influence: Tensor | None) -> None:
        in_k = buckets(41, 6, 1)
        real = torch.arange(41).expand(2, -1) % 3 > 0
        bases = []
        for fill in (0, 5):
            in_q = torch.where(real[:, None], buckets(41, 6, 0), fill)
            bases.append(arcs.by_rank(in_q, in_k, arcs.Tokens(None, influence, torch.tensor([41]), 4)).base)
        rows = real[:, None].expand_as(bases[0])
        assert torch.equal(bases[0][rows], bases[1][rows])

    unmoved(torch.arange(41).expand(2, -1) % 3 > 0)
    with pytest.raises(AssertionError):  # control: padded queries sorted among the others
        unmoved(None)


RULES = {
    "bucket": lambda *a: arcs.by_bucket(*a, strict=False),
    "strict": lambda *a: arcs.by_bucket(*a, strict=True),
    "causal": arcs.by_bucket_causal,
    "rank": arcs.by_rank,
}


@pytest.mark.parametrize("rows", [1, 3, 16])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("keep", KEEPS.values(), ids=KEEPS)
def test_blocks_hold_exactly_the_pairs_of_the_arcs(keep, rule, rows):
    chunk = 5
    in_q, in_k = buckets(41, 5, 0), buckets(41, 5, 1)
    shared = tokens(keep, 41, chunk)
    found = RULES[rule](in_q, in_k, shared)
    query, filled, slot = arcs.pack(found.group, shared.influence, rows)
    key, seen = found.stretch(query, 2 * chunk, shared.valid)
    seen = seen & filled.unsqueeze(-1)
    again = found.sees(query, key, shared.valid)  # the same question asked the other way
    assert torch.equal(again & seen, seen)
    for b in range(2):
        for h in range(3):
            block, row, step = seen[b, h].nonzero().unbind(-1)
            pairs = list(zip(query[b, h, block, row].tolist(), key[b, h, block, step].tolist(), strict=True))
            assert len(pairs) == len(set(pairs)), "a pair occurs twice"
            assert set(pairs) == {(i, j) for i, j in hits(found, shared)[b, h].nonzero().tolist()}
    assert torch.equal(query.flatten(2).gather(-1, slot), torch.arange(41).expand_as(slot))
    assert int(filled.sum()) == slot.numel()
