"""The real weights, loaded once per test process."""

from types import SimpleNamespace

import pytest
import transformers

from tests.support.model_zoo import build


@pytest.fixture(autouse=True, scope="session")
def quiet():
    transformers.logging.set_verbosity_error()


@pytest.fixture(scope="session")
def minilm():
    """MiniLM and two texts of 512 tokens."""
    from sparing.models import minilm

    encoder = minilm.load()
    return SimpleNamespace(model=encoder.model, ids=minilm.token_ids(encoder))


@pytest.fixture
def bert():
    return build("bert")
