"""`ssd-jax distill`: its stages one by one or together, again, and with other settings."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from ssd_jax.cli.distill import STOPPED
from ssd_jax.cli.main import main
from ssd_jax.llm.llm import LLM
from ssd_jax.sampling.params import SamplingParams
from ssd_jax.testing import tiny
from ssd_jax.tools.distill.shards import read_shards
from ssd_jax.tools.distill.target import open_target
from tests.tools.distill import tiny_run

STAGES = ("prompts", "generate")


@pytest.fixture(scope="module")
def place(tmp_path_factory, tiny_checkpoint) -> Path:
    """A directory with files and a configuration of them."""
    directory = tiny_run.write_data(tmp_path_factory.mktemp("distill"))
    tiny_run.write_config(directory, tiny_checkpoint)
    return directory


def distill(place, out, *arguments) -> int:
    given = [f"--config={place / 'config.toml'}", f"--out={place / out}", "--compile_cache=off"]
    return main(["distill", *given, *arguments])


@pytest.fixture(scope="module")
def finished(place) -> Path:
    """What both stages have made."""
    for stage in STAGES:
        assert distill(place, "finished", f"--stage={stage}") == 0
    return place / "finished"


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.glob("generate/*"))}


@pytest.mark.more
def test_the_text_is_what_the_engine_would_say(finished, tiny_checkpoint):
    manifest = json.loads((finished / "generate" / "manifest.json").read_text())
    assert manifest["inputs"]["target"] == open_target(str(tiny_checkpoint)).sha256
    assert len(manifest["data"]["shards"]) > 2
    samples = list(read_shards(finished / "generate"))
    assert len(samples) == 12
    prompts = [sample.tokens[: sample.prompt_length or 24].tolist() for sample in samples]
    context = 12 + max(map(len, prompts))  # the same programs
    llm = LLM(str(tiny_checkpoint), dtype="float32", slots=3, context=context, compile_cache="off")
    for index, prompt in enumerate(prompts):
        temperature = (0.0, 0.7, 1.0)[index % 3]  # all of the first turn: there are 13 prompts
        params = SamplingParams(temperature=temperature, seed=0, max_tokens=12)
        (output,) = [e.output for e in llm.run([llm.request(prompt, params, index)]) if e.output]
        assert samples[index].tokens[len(prompt) :].tolist() == output.token_ids


@pytest.mark.more
def test_scores_are_kept_of_what_is_learnt(finished):
    for sample in read_shards(finished / "generate"):
        learnt = list(sample.learnt)
        assert sample.top_ids.shape == (len(sample.tokens), 8)
        assert (sample.top_probs[learnt].sum(-1) > 0.1).all()
        greedy = sample.top_ids[learnt, 0] == sample.tokens[np.array(learnt) + 1]
        assert greedy.any()


@pytest.mark.slow
def test_a_killed_process_goes_on_bit_for_bit(place, finished):
    code = (
        "import os, signal, sys\n"
        "write, count = os.fsync, [0]\n"
        "def die(descriptor):\n"
        "    count[0] += 1\n"
        "    if count[0] == 23: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    write(descriptor)\n"
        "os.fsync = die\n"
        "from ssd_jax.cli.main import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    command = [sys.executable, "-c", code, "distill", f"--config={place / 'config.toml'}"]
    command += [
        f"--out={place / 'killed'}",
        f"--compile_cache={jax.config.jax_compilation_cache_dir}",
    ]
    killed = subprocess.run(command, env=os.environ | {"JAX_PLATFORMS": "cpu"}, check=False)
    assert killed.returncode == -signal.SIGKILL
    left = files(place / "killed")
    assert [name for name in left if name.endswith(".partial")]
    assert 0 < len([name for name in left if name.startswith("shard")]) < len(files(finished))
    assert distill(place, "killed") == 0
    assert files(place / "killed") == files(finished)


@pytest.mark.more
def test_finished_stages_are_skipped(place, finished, monkeypatch, capsys):
    monkeypatch.setattr("ssd_jax.llm.llm.LLM", None)
    monkeypatch.setattr("ssd_jax.tools.distill.scoring.load_scorer", None)
    before = files(finished)
    assert distill(place, "finished", "--stage=generate") == 0
    assert distill(place, "finished", "--stage=prompts") == 0
    assert files(finished) == before
    assert "made before" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "stage", "lines"),
    [
        ({"generate_seed": "1"}, "generate", ["generate.seed is 1, was 0"]),
        (
            {"generate_seed": "1", "generate_top_n": "4"},
            "generate",
            ["generate.seed is 1, was 0", "generate.top_n is 4, was 8"],
        ),
        ({"prompts_longest": "47"}, "prompts", ["prompts.longest is 47, was 48"]),
        ({"target_dtype": '"bfloat16"'}, "generate", ['target.dtype is "bfloat16", was "float32"']),
    ],
)
def test_other_settings_are_refused_with_their_keys(
    place, finished, tiny_checkpoint, capsys, change, stage, lines
):
    other = place / "other"
    other.mkdir(exist_ok=True)
    tiny_run.write_config(other, tiny_checkpoint, prompts_directory='".."', **change)
    for chosen in ((), (f"--stage={stage}",)):
        arguments = [f"--config={other / 'config.toml'}", f"--out={finished}", *chosen]
        assert main(["distill", *arguments, "--compile_cache=off"]) == 2
        stderr = capsys.readouterr().err
        assert [line.strip() for line in stderr.splitlines()[1:-1]] == lines
        assert f"remove {finished / stage}" in stderr


def test_another_target_is_refused_with_both_hashes(place, finished, tmp_path, capsys):
    target = tiny.write_checkpoint(tmp_path / "target", seed=5)
    config = tiny_run.write_config(tmp_path, target, prompts_directory=f'"{place}"')
    arguments = [f"--config={config}", f"--out={finished}", "--compile_cache=off"]
    old = json.loads((finished / "prompts" / "manifest.json").read_text())["inputs"]["target"]
    for stage in STAGES:
        assert main(["distill", *arguments, f"--stage={stage}"]) == 2
        stderr = capsys.readouterr().err
        new = open_target(str(target)).sha256
        assert f"the target has sha256 {new}, was {old}" in stderr


def test_prompts_of_another_target_are_not_completed(place, finished, tmp_path, capsys):
    """Nothing of the stage is there that could be of another target itself."""
    shutil.copytree(finished / "prompts", tmp_path / "out" / "prompts")
    target = tiny.write_checkpoint(tmp_path / "target", seed=5)
    config = tiny_run.write_config(tmp_path, target, prompts_directory=f'"{place}"')
    given = [f"--config={config}", f"--out={tmp_path / 'out'}", "--compile_cache=off"]
    assert main(["distill", *given, "--stage=generate"]) == 2
    stderr = capsys.readouterr().err
    assert f"the target has sha256 {open_target(str(target)).sha256}, was " in stderr
    assert not (tmp_path / "out" / "generate").exists()


def test_a_file_that_changed_is_refused(place, finished, tmp_path, tiny_checkpoint, capsys):
    tiny_run.write_data(tmp_path)
    (tmp_path / "held_out.jsonl").write_text('{"prompt": "another"}')
    config = tiny_run.write_config(tmp_path, tiny_checkpoint)
    arguments = [f"--config={config}", f"--out={finished}", "--compile_cache=off"]
    assert main(["distill", *arguments, "--stage=prompts"]) == 2
    assert re.search(r"held_out.jsonl has sha256 \w+, was \w+", capsys.readouterr().err)


def test_input_that_was_refused_can_be_mended(place, tmp_path, tiny_checkpoint, capsys):
    tiny_run.write_data(tmp_path)
    config = tiny_run.write_config(tmp_path, tiny_checkpoint)
    arguments = [f"--config={config}", f"--out={tmp_path / 'out'}", "--compile_cache=off"]
    (tmp_path / "train.jsonl").write_text("{")
    assert main(["distill", *arguments, "--stage=prompts"]) == 2
    assert f"{tmp_path / 'train.jsonl'}:1: not JSON" in capsys.readouterr().err
    tiny_run.write_data(tmp_path)
    assert main(["distill", *arguments, "--stage=prompts"]) == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "magpie.max_tokens = 99999 leaves no room for a prompt"),
        ({"magpie_max_tokens": "9", "prompts_train": '["none.jsonl"]'}, "prompts 'none.jsonl': "),
        (
            {
                "magpie_max_tokens": "9",
                "prompts_train": '[{path="train.jsonl", ids="9"}]',
            },
            "no line has one of the ids 9",
        ),
        (
            {"magpie_max_tokens": "9", "generate_top_n": "9999"},
            f"generate.top_n = 9999 is more than the {tiny.TOKENS} tokens",
        ),
    ],
)
def test_settings_of_later_stages_are_checked_before_the_first(
    tmp_path, tiny_checkpoint, capsys, monkeypatch, changes, message
):
    monkeypatch.setattr("ssd_jax.tools.distill.stages.generate", None)
    directory = tiny_run.write_data(tmp_path)
    tiny_run.write_config(directory, tiny_checkpoint, **{"magpie_max_tokens": "99999"} | changes)
    assert distill(directory, "out") == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"evaluate_max_tokens": "500"}, "evaluate.max_tokens = 500 are more than the 512 pos"),
        ({"evaluate_sets": '["long.jsonl"]'}, "no held-out prompt of 'long.jsonl' is left"),
    ],
)
def test_evaluation_that_cannot_be_is_refused_before_anything_is_generated(
    tmp_path, tiny_checkpoint, capsys, monkeypatch, changes, message
):
    monkeypatch.setattr("ssd_jax.tools.distill.stages.generate", None)
    directory = tiny_run.write_data(tmp_path)
    tiny_run.write_lines(directory / "long.jsonl", {"question": "Why? " * 50})
    held_out = {"prompts_held_out": '["held_out.jsonl", "long.jsonl"]'}
    draft = {"draft_layers": "[0]", "train_steps": "4", "evaluate_ks": "[2]"}
    tiny_run.write_config(directory, tiny_checkpoint, **held_out | draft | changes)
    assert distill(directory, "out") == 2
    assert message in capsys.readouterr().err


def test_a_configuration_is_not_named_like_a_stage(place, capsys):
    (place / "generate.toml").write_text(next(place.glob("*.toml")).read_text())
    assert main(["distill", f"--config={place / 'generate.toml'}"]) == 2
    assert "would be that of a stage, named like a section; rename" in capsys.readouterr().err


def test_a_stage_needs_the_one_before(place, capsys):
    assert distill(place, "new", "--stage=generate") == 2
    assert "needs stage prompts, which is not finished" in capsys.readouterr().err


def test_two_runs_do_not_share_a_directory(place, finished, capsys):
    import fcntl

    with (finished / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert distill(place, "finished") == 2
    assert "another ssd-jax distill is at work" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give --config=FILE"),
        (("--config=none.toml",), "none.toml does not exist"),
        (("--config=none.toml", "--stage=sleep"), "stage = 'sleep' is unknown; one of magpie, "),
    ],
)
def test_bad_flags_are_explained(arguments, message, capsys):
    assert main(["distill", *arguments]) == 2
    assert message in capsys.readouterr().err


TRAINED = {"draft_layers": "[0]", "train_steps": "4"}


@pytest.fixture
def train(place, finished, tiny_checkpoint, monkeypatch):
    """Runs the command with sections for training; what trains is a stand-in."""
    from ssd_jax.tools.distill.training import loop

    calls = []

    def run(settings, draft, *, samples, work, target, progress, on_save):
        del progress
        calls.append((settings, draft, len(list(samples)), open_target(target.source).sha256))
        done = settings.steps if len(calls) > 1 else 1
        if settings.save_every == 1:
            on_save()
            raise KeyboardInterrupt
        stop_reason = "" if done == settings.steps else "max_seconds = 1 are over"
        (work / "draft").mkdir(exist_ok=True)
        (work / "draft" / "model.safetensors").write_text(f"{done} {draft.store}")
        return loop.Result(step=done, stop_reason=stop_reason, held_out={}, draft=work / "draft")

    monkeypatch.setattr(loop, "run", run)
    shutil.rmtree(finished / "config", ignore_errors=True)

    def command(*arguments, **changes):
        other = place / "trained"
        other.mkdir(exist_ok=True)
        settings = TRAINED | changes
        tiny_run.write_config(other, tiny_checkpoint, prompts_directory='".."', **settings)
        config = f"--config={other / 'config.toml'}"
        return main(["distill", config, f"--out={finished}", "--compile_cache=off", *arguments])

    return command, calls


def test_training_that_stops_early_goes_on_until_it_is_finished(train, finished, capsys):
    command, calls = train
    assert command() == STOPPED != 0
    stderr = capsys.readouterr().err
    assert "train: step 1 of 4" in stderr
    assert "stopped (max_seconds = 1 are over); the same command goes on" in stderr
    assert command(train_max_seconds="9.0") == 0  # how long a run may take is no matter
    assert "train: step 4 of 4" in capsys.readouterr().err
    assert command() == 0
    assert "train, made before" in capsys.readouterr().err
    assert len(calls) == 2
    settings, draft, samples, target = calls[0]
    assert (settings.steps, draft.layers, samples) == (4, (0,), 12)
    assert (
        target == json.loads((finished / "generate/manifest.json").read_text())["inputs"]["target"]
    )
    assert command(draft_store='"int8"') == 0  # the same weights, written otherwise
    assert len(calls) == 3


def test_a_draft_is_trained_beside_another_one_of_the_same_text(train, finished, capsys):
    import fcntl

    command, calls = train
    configuration = finished / "config"
    configuration.mkdir(exist_ok=True)
    for directory, status in ((configuration, 2), (finished, STOPPED)):
        with (directory / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            assert command("--stage=train") == status
    assert f"is at work in {configuration}" in capsys.readouterr().err
    assert len(calls) == 1


def test_a_draft_that_is_damaged_or_gone_is_made_again(train, finished, capsys):
    command, calls = train
    command()
    command()
    draft = finished / "config" / "train" / "draft"
    for done, damage in enumerate((lambda: shutil.rmtree(draft), lambda: _flip(draft)), start=3):
        damage()
        left = finished / "config" / "train" / ".draft.0a1b.partial"
        left.mkdir()
        assert command() == 0
        assert len(calls) == done
        assert not left.exists()
        assert (draft / "model.safetensors").read_text() == "4 bfloat16"
    capsys.readouterr()
    assert command() == 0
    assert "train, made before" in capsys.readouterr().err


def test_results_that_were_moved_are_those_of_where_they_are(train, finished, place, capsys):
    command, calls = train
    command()
    command()
    moved = place / "moved"
    shutil.copytree(finished, moved)
    shutil.rmtree(finished / "config" / "train")
    assert command(f"--out={moved}") == 0
    assert f"train, made before: {moved / 'config/train/draft'}" in capsys.readouterr().err
    assert len(calls) == 2


def test_a_draft_that_goes_on_from_one_that_was_trained_anew_is_made_again(train, monkeypatch):
    from ssd_jax.tools.distill.training import model

    command, calls = train
    begun = SimpleNamespace(digest=lambda: "first")
    monkeypatch.setattr(model, "open_beginning", lambda *_arguments: begun)
    for _ in range(3):
        command()
    assert len(calls) == 2  # the first stopped early, the third was made before
    begun.digest = lambda: "second"
    command()
    assert len(calls) == 3


def _flip(draft: Path) -> None:
    (draft / "model.safetensors").write_text("5 bfloat16")


def test_a_draft_in_training_cannot_be_changed(train, capsys):
    command, calls = train
    command()
    for stage in ((), ("--stage=train",)):
        assert command(*stage, train_steps="5", draft_layers="[1]") == 2
        stderr = capsys.readouterr().err
        assert "draft.layers is [1], was [0]" in stderr
        assert "train.steps is 5, was 4" in stderr
    assert len(calls) == 1


def test_a_draft_whose_training_was_killed_after_a_checkpoint_cannot_be_changed(train, capsys):
    command, calls = train
    assert command(train_save_every="1") == 130
    assert command(train_steps="5") == 2
    assert "train.steps is 5, was 4" in capsys.readouterr().err
    assert len(calls) == 1
    assert command() == 0  # how often it is saved is no matter


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"draft_layers": "[0, 2]"}, "layers: 2 is out of range, the target has layers 0 to 1"),
        ({"draft_output_size": "1"}, "output_size = 1 has no room for the"),
        ({"draft_output_size": "320"}, f"more than the {tiny.TOKENS} ids of the tokenizer"),
        ({"train_devices": "999"}, "devices = 999, but there are"),
        ({"train_devices": "3"}, "8 rows do not spread evenly over 3 devices"),
    ],
)
def test_impossible_training_is_refused_before_anything_is_made(
    train, place, capsys, change, message
):
    command, calls = train
    out = place / "impossible"
    assert command(f"--out={out}", **change) == 2
    assert message in capsys.readouterr().err
    assert not [path for path in out.rglob("*") if path.name != ".lock"]
    assert calls == []


def test_training_needs_its_sections(place, finished, capsys):
    assert distill(place, "finished", "--stage=train") == 2
    assert "has no [draft] and [train]" in capsys.readouterr().err
