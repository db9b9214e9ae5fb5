"""transformers, run now, against the stored goldens and against this package.

Marked `oracle`: needs torch and transformers, see the README beside this file. That the stored
logits still are what transformers computes keeps the default suite's goldens honest.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

GOLDENS = Path(__file__).resolve().parents[1] / "goldens" / "logits"
NAMES = sorted(path.parent.name for path in GOLDENS.glob("*/logits.npz"))
NEW_LENGTH = 57  # neither the stored length nor a multiple of a block
TOLERANCE = 1e-4

pytestmark = [pytest.mark.oracle, pytest.mark.parametrize("name", NAMES)]


@pytest.fixture
def oracle_logits(name):
    """A function from tokens [B, T] to the float32 logits [B, T, V] of transformers."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        GOLDENS / name, dtype=torch.float32, attn_implementation="eager"
    ).eval()

    def logits(tokens: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return model(torch.from_numpy(tokens).long(), use_cache=False).logits.numpy()

    return logits


def test_stored_logits_are_what_transformers_computes(name, oracle_logits):
    with np.load(GOLDENS / name / "logits.npz") as stored:
        np.testing.assert_allclose(
            oracle_logits(stored["tokens"]), stored["logits"], rtol=0, atol=TOLERANCE
        )


def test_our_logits_on_new_tokens_equal_those_of_transformers(name, oracle_logits):
    from tests.models.golden import our_logits

    with np.load(GOLDENS / name / "logits.npz") as stored:
        vocabulary = stored["logits"].shape[-1]
    rng = np.random.default_rng(NAMES.index(name))
    tokens = rng.integers(0, vocabulary, (3, NEW_LENGTH), dtype=np.int32)
    np.testing.assert_allclose(
        our_logits(GOLDENS / name, tokens), oracle_logits(tokens), rtol=0, atol=TOLERANCE
    )
