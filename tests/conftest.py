"""Real q, k, v: the layers of MiniLM on a Python help topic, computed once per test process."""

import pytest


@pytest.fixture(scope="session")
def minilm_layers():
    """Six layers, one text of 128 tokens: `query`, `key` [1, 12, 128, 32] and `value`, a Projection."""
    from sparing.models import minilm
    from sparing.transformers.watch import record_calls

    encoder = minilm.load()
    ids = minilm.token_ids(encoder, length=128, documents=1)
    return record_calls(encoder.model, "monte_carlo", lambda: encoder.model(input_ids=ids))
