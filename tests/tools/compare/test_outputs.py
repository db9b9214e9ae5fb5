"""Reading what `generate --json` wrote."""

import json

import pytest

from ssd_jax.errors import InputError
from ssd_jax.tools.compare.pairs import read_outputs

GOOD = {"prompt_index": 0, "token_ids": [1, 2], "text": "x", "finish_reason": "stop", "metrics": {}}


def write(path, *lines):
    path.write_text(
        "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    )
    return path


def test_answers_and_refusals_are_read(tmp_path):
    path = write(tmp_path / "a.jsonl", {"prompt_index": 1, "error": "too long"}, "", GOOD)
    outputs = read_outputs(path)
    assert outputs[0].token_ids == (1, 2)
    assert outputs[0].finish_reason == "stop"
    assert outputs[1].error == "too long"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", ":2: not JSON"),
        ({"prompt": "x"}, ':2: "prompt_index" must be an integer'),
        ({"prompt_index": 1}, ':2: "token_ids" must be a list'),
        (GOOD | {"prompt_index": -1}, ':2: "prompt_index" must be an integer'),
        (GOOD | {"prompt_index": True}, ':2: "prompt_index" must be an integer'),
        (GOOD | {"prompt_index": 1, "token_ids": [3, "4"]}, r":2: token_ids\[1\] must be"),
        (GOOD | {"prompt_index": 1, "finish_reason": None}, ':2: "finish_reason" must be'),
        (GOOD, "prompt_index 0 comes twice"),
    ],
)
def test_a_line_that_is_no_output_is_named(tmp_path, line, message):
    with pytest.raises(InputError, match=message):
        read_outputs(write(tmp_path / "a.jsonl", GOOD, line))


def test_an_empty_file_is_refused(tmp_path):
    with pytest.raises(InputError, match="no outputs"):
        read_outputs(write(tmp_path / "a.jsonl", ""))
