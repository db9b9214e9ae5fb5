"""A request by itself: what it keeps where it is put off or cut off."""

import numpy as np
import pytest

from ssd_jax.checkpoints.tokenizers.detokenizer import ByteStream
from ssd_jax.engine.requests.metrics import RequestTimes, RoundRecord
from ssd_jax.engine.requests.sequence import Sequence
from ssd_jax.engine.requests.state import RequestState
from ssd_jax.engine.requests.stop_strings import TextStream
from ssd_jax.roles.records import Outcomes, TopLogprobs
from tests.engine.letters import ids, request

BEGINNING = 3  # of a character
PIECES = {BEGINNING: b"\xe2"} | {id: bytes([id]) for id in ids("abc")}


@pytest.fixture
def state():
    asked = request(logprobs=0)
    return RequestState(
        request_id=0,
        request=asked,
        text=TextStream(ByteStream(PIECES.__getitem__, (), strip_space=False), (), 0),
        times=RequestTimes(arrived=0.0, speculative=True),
        sequence=Sequence(asked, eos_ids=frozenset(), context=64),
    )


def extend(state, tokens, now):
    """A round, read at `now` seconds, has committed these tokens."""
    count, row = len(tokens), np.array([tokens], np.int32)
    log = TopLogprobs(-row.astype(np.float32), row[..., None], -row[..., None].astype(np.float32))
    state.commit(tokens, now)
    known = RoundRecord(committed=count, accepted=count - 1, seconds=1.0)
    state.record(Outcomes(np.array([count - 1], np.int32), row, log), 0, tokens, known)
    state.text.push(tokens)


def test_a_request_that_was_put_off_has_figures_and_logprobs_of_all_its_tokens(state):
    extend(state, ids("a"), 1.0)
    extend(state, ids("bca"), 2.0)
    state.put_off()
    extend(state, ids("bc"), 9.0)
    output = state.final("length", state.text.finish()).output
    assert output.token_ids == [entry.token_id for entry in output.logprobs] == ids("abcabc")
    assert output.metrics["ttft_ms"] == 1000
    assert output.metrics["acceptance_histogram"] == [0, 1, 1]
    assert output.metrics["preemptions"] == 1


@pytest.mark.parametrize("reason", ["cancelled", "error"])
def test_a_text_cut_off_amid_a_character_has_logprobs_of_the_tokens_before_it(state, reason):
    extend(state, ids("a"), 1.0)
    extend(state, [*ids("bc"), BEGINNING], 2.0)
    output = state.final(reason, state.text.cut()).output
    assert output.token_ids == [entry.token_id for entry in output.logprobs] == ids("abc")
    assert output.metrics["tokens_per_second"] == 2
    assert output.metrics["acceptance_histogram"] == [0, 1]
