"""What is taken of a checkpoint's own sampling settings, and where it goes."""

from __future__ import annotations

import json
import shutil

import pytest

from ssd_jax.checkpoints.generation_config import FILE, read_sampling
from ssd_jax.checkpoints.opening import open_checkpoint
from ssd_jax.checkpoints.orbax import write_checkpoint
from ssd_jax.cli import settings
from ssd_jax.cli.loading import params_of
from ssd_jax.errors import InputError
from ssd_jax.llm.prompting import default_params
from ssd_jax.sampling.params import SamplingParams
from tests.checkpoints import tiny_gguf
from tests.checkpoints import tiny_models as tiny

HOT = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.1}
TAKEN = {name: HOT[name] for name in HOT if name != "do_sample"}


@pytest.fixture
def directory(tiny_checkpoint, tmp_path):
    """A checkpoint that says how to sample from it."""
    path = shutil.copytree(tiny_checkpoint, tmp_path / "model")
    fields = json.loads((path / FILE).read_text())
    (path / FILE).write_text(json.dumps(fields | HOT))
    return path


def parsed(capsys, directory, *arguments):
    """What the flags make of it, and what is said."""
    values = settings.new_flags()
    given = settings.parse(values, "generate", [f"--target={directory}", *arguments])
    params = params_of(settings.config_of(given), given, values)
    return params, capsys.readouterr().err


@pytest.mark.parametrize(
    ("written", "taken"),
    [
        (HOT, TAKEN),
        ({"temperature": None, "top_k": -1, "max_new_tokens": 7}, {"top_k": -1}),
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"do_sample": False, "temperature": 0.6}, {"temperature": 0.0}),
        (None, {}),
    ],
)
def test_sampling_defaults_of_a_directory_come_from_its_file(directory, written, taken):
    (directory / FILE).unlink() if written is None else (directory / FILE).write_text(
        json.dumps(written)
    )
    where, found = read_sampling(open_checkpoint(str(directory)))
    assert (where, found) == (directory / FILE, taken)


def test_sampling_defaults_of_gguf_come_from_its_keys(tmp_path):
    settings = {"temp": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.05, "penalty_repeat": 1.1}
    keys = tiny_gguf.metadata("llama") | {f"general.sampling.{k}": v for k, v in settings.items()}
    path = tiny_gguf.write(tmp_path / "m.gguf", "llama", tiny.hf_tensors("llama"), keys=keys)
    assert read_sampling(open_checkpoint(str(path))) == (path, TAKEN | {"min_p": 0.05})
    plain = tiny_gguf.write(tmp_path / "n.gguf", "llama", tiny.hf_tensors("llama"))
    assert read_sampling(open_checkpoint(str(plain))) == (plain, {})


def test_sampling_defaults_none_is_greedy_and_auto_the_checkpoints(directory):
    checkpoint = open_checkpoint(str(directory))
    assert default_params("none", checkpoint) == SamplingParams()
    assert default_params("auto", checkpoint) == SamplingParams(**TAKEN)


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (
            '{"temperature": "hot"}',
            "temperature = 'hot' is not understood; give a number; correct it, or use",
        ),
        ('{"top_p": 1.5}', "top_p = 1.5 is out of range"),
        ("[]", "holds a JSON list"),
    ],
)
def test_impossible_sampling_defaults_are_refused_with_the_files_name(directory, written, message):
    checkpoint = open_checkpoint(str(directory))
    (directory / FILE).write_text(written)
    assert default_params("none", checkpoint) == SamplingParams()
    with pytest.raises(InputError, match=rf"{FILE}.*{message}"):
        default_params("auto", checkpoint)


def test_flags_override_sampling_defaults_and_a_line_says_what_is_taken(
    directory, tmp_path, capsys
):
    assert parsed(capsys, directory) == (SamplingParams(), "")
    auto = "--generation_config=auto"
    params, line = parsed(capsys, directory, auto, "--top_p=1", "--max_tokens=9")
    assert params == SamplingParams(**TAKEN | {"top_p": 1.0}, max_tokens=9)
    taken = "temperature = 0.7, top_k = 20, repetition_penalty = 1.1"
    assert line == f"generation_config auto: the checkpoint's {taken}\n"
    file = tmp_path / "settings.toml"
    file.write_text('temperature = 0.0\ngeneration_config = "auto"\n')
    params, line = parsed(capsys, directory, f"--config={file}")
    assert (params.temperature, params.top_k) == (0.0, 20)
    (directory / FILE).unlink()
    _, line = parsed(capsys, directory, auto)
    assert line == "generation_config auto: nothing of the checkpoint's is taken\n"


def test_a_converted_checkpoint_keeps_its_sampling_defaults(directory, tmp_path):
    write_checkpoint(tmp_path / "out", open_checkpoint(str(directory)), "bfloat16")
    back = open_checkpoint(str(tmp_path / "out"))
    assert read_sampling(back)[1] == TAKEN
    assert back.load_tokenizer().eos_ids == open_checkpoint(str(directory)).load_tokenizer().eos_ids
