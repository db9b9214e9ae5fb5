"""Shards hold token ids in the smallest type, and give back what was put in."""

import numpy as np
import pytest
from safetensors.numpy import load

from ssd_jax.tools.distill.shards import (
    Sample,
    decode_texts,
    encode_scores,
    encode_texts,
    with_scores,
)
from ssd_jax.tools.distill.training.data import pack

SAMPLES = [
    Sample(tokens=np.array([5, 6, 7, 8], np.int32), prompt_length=2),
    Sample(tokens=np.array([9], np.int32), prompt_length=0),
    Sample(tokens=np.array([1, 2, 3], np.int32), prompt_length=0),
]


def test_positions_to_learn_are_the_completion_or_all_of_a_text():
    assert [list(sample.learnt) for sample in SAMPLES] == [[1, 2], [], [0, 1]]


@pytest.mark.parametrize(("vocabulary", "dtype"), [(2**16, np.uint16), (2**16 + 1, np.uint32)])
def test_ids_take_two_bytes_where_the_vocabulary_allows(vocabulary, dtype):
    assert load(encode_texts(SAMPLES, vocabulary))["tokens"].dtype == dtype


@pytest.mark.parametrize("last", [2**16 - 1, 2**17])
def test_the_highest_id_survives(last):
    sample = Sample(tokens=np.array([0, last], np.int32), prompt_length=1)
    (back,) = decode_texts(encode_texts([sample], last + 1))
    assert back.tokens.tolist() == [0, last]


@pytest.mark.parametrize(("vocabulary", "dtype"), [(2**16, np.uint16), (2**16 + 1, np.uint32)])
def test_samples_come_back_with_the_scores_of_their_positions(vocabulary, dtype):
    ids, probs = np.arange(8).reshape(4, 2), np.array([[0.5, 0.25]] * 3 + [[1e-7, 0.0]])
    texts = decode_texts(encode_texts(SAMPLES, vocabulary))
    back = with_scores(texts, encode_scores(ids, probs, vocabulary))
    for sample, before in zip(back, SAMPLES, strict=True):
        assert sample.tokens.tolist() == before.tokens.tolist()
        assert sample.prompt_length == before.prompt_length
        assert sample.top_ids.shape == sample.top_probs.shape == (len(sample.tokens), 2)
        assert (sample.top_ids.dtype, sample.top_probs.dtype) == (dtype, np.float16)
    assert back[0].top_ids.tolist() == [[0, 0], [0, 1], [2, 3], [0, 0]]
    assert back[0].top_probs[1:3].tolist() == [[0.5, 0.25]] * 2
    assert back[0].top_probs[[0, 3]].tolist() == [[0, 0]] * 2
    assert back[2].top_ids.tolist() == [[4, 5], [6, 7], [0, 0]]
    np.testing.assert_allclose(back[2].top_probs[1], [1e-7, 0], atol=5e-8)


def test_shards_are_packed_for_training_whatever_their_types():
    for vocabulary in (2**16, 2**17):
        last = vocabulary - 1
        sample = Sample(tokens=np.array([1, last, 3], np.int32), prompt_length=1)
        texts = decode_texts(encode_texts([sample], vocabulary))
        ids, probs = np.array([[last], [0]]), np.array([[0.5], [0.25]])
        (back,) = with_scores(texts, encode_scores(ids, probs, vocabulary))
        batch = pack([back], length=8, seed=0, label="here").batch([0])
        assert (batch.top_ids.dtype, batch.top_probs.dtype) == (np.int32, np.float32)
        assert batch.top_ids[0, :2, 0].tolist() == [last, 0]
        assert batch.top_probs[0, :2, 0].tolist() == [0.5, 0.25]
