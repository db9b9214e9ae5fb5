"""A configuration says what is made; what is wrong with it is named before anything runs."""

import re
from pathlib import Path

import pytest

from ssd_jax.errors import InputError
from ssd_jax.tools.distill.prompt_settings import PromptEntry, parse_ranges
from ssd_jax.tools.distill.settings import determining_values, read_settings
from tests.tools.distill import tiny_run

SHIPPED = sorted((Path(__file__).parents[3] / "configs" / "distill").glob("*.toml"))
TRAINED = [path for path in SHIPPED if read_settings(path).train is not None]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_configuration_is_valid(path):
    given = read_settings(path)
    assert given.prompts.held_out
    longest = given.prompts.longest + given.generate.max_tokens
    assert given.generate.shard_tokens >= 4 * given.generate.slots * longest  # they stay busy


@pytest.mark.parametrize("path", TRAINED, ids=lambda path: path.stem)
def test_a_row_of_a_shipped_configuration_holds_a_completion_and_as_long_a_prompt(path):
    given = read_settings(path)
    assert given.train is not None
    assert given.train.length >= 2 * given.generate.max_tokens


@pytest.mark.parametrize("name", ["smollm2", "smollm2-wide"])
def test_the_shipped_drafts_of_a_target_share_its_text(name):
    every = map(read_settings, TRAINED)
    light, strong = (given for given in every if given.target.name == name)
    assert light.target == strong.target
    for section in ("prompts", "magpie", "generate"):
        assert getattr(light, section) == getattr(strong, section)


def test_entries_are_paths_with_or_without_ids(tmp_path):
    given = tiny_run.settings(
        tmp_path, prompts_train='["a.jsonl", {path = "b.jsonl", ids = "1-3,7"}]'
    )
    assert given.prompts.train == (
        PromptEntry(path="a.jsonl"),
        PromptEntry(path="b.jsonl", ids="1-3,7"),
    )
    assert given.directory == tmp_path
    assert given.prompts.train[1].id_ranges == (range(1, 4), range(7, 8))


def test_entries_say_which_part_and_how_it_is_asked(tmp_path):
    given = tiny_run.settings(
        tmp_path,
        prompts_train='["a.txt", {path = "a.txt", tasks = 1}, {path = "b", limit = 2, times = 3}]',
    )
    assert [entry.set for entry in given.prompts.train] == ["a.txt", "a.txt:tasks", "b"]
    assert determining_values("prompts", given.prompts)["prompts.train"] == [
        "a.txt",
        "a.txt[tasks=1]",
        "b[limit=2, times=3]",
    ]


def test_turns_to_write_have_settings_of_their_own(tmp_path):
    given = tiny_run.settings(tmp_path, magpie_completions="20")
    assert given.magpie is not None
    assert (given.magpie.completions, given.magpie.top_n) == (20, 0)
    assert 0.0 not in given.magpie.temperatures
    assert tiny_run.settings(tmp_path).magpie is None


def test_the_directory_of_the_prompts_can_be_given(tmp_path):
    path = tiny_run.write_config(tmp_path, prompts_directory='"files"')
    assert read_settings(path).directory == tmp_path / "files"
    assert read_settings(path, data=Path("else")).directory == Path("else")


def test_passages_are_no_concern_without_a_text_to_cut(tmp_path):
    given = tiny_run.settings(
        tmp_path, prompts_passage_tokens="99", prompts_train='["train.jsonl"]'
    )
    assert given.prompts.longest == 48


@pytest.mark.parametrize("text", ["", "3-1", "a", "1,,2", "1-", "-3", "1-2-3"])
def test_a_bad_range_is_refused(text):
    with pytest.raises(InputError, match=re.escape("x: ")):
        parse_ranges(text, "x")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"generate_slotz": "3"}, "[generate] unknown key 'slotz'; did you mean 'slots'?"),
        ({"promts_train": "3"}, "unknown key 'promts'; did you mean 'prompts'?"),
        ({"generate_slots": "0"}, "[generate] slots = 0 must be at least 1"),
        ({"generate_slots": '"4"'}, "[generate] slots = '4' is not understood; give an integer"),
        ({"generate_temperatures": "[]"}, "[generate] temperatures = []"),
        ({"generate_temperatures": "[0.5, -1.0]"}, "[generate] temperature = -1.0"),
        (
            {"prompts_train": "[]", "draft_layers": "[0]", "train_steps": "2"},
            "[prompts] train is empty",
        ),
        ({"prompts_held_out": "[]"}, "[prompts] held_out is empty"),
        ({"prompts_train": '["a", "a"]'}, "train lists 'a' twice"),
        ({"prompts_train": '[{path = "a", id = "1"}]'}, "is not understood"),
        ({"prompts_train": '[{path = "a", ids = "5-1"}]'}, "train: a: '5-1' of '5-1' is no range"),
        ({"prompts_train": '[{path = "a", ids = ""}]'}, "train: a: '' of '' is no range"),
        ({"prompts_train": '[{path = "a", tasks = 0}]'}, "is not understood"),
        (
            {"prompts_train": '[{path = "a", tasks = 1}, {path = "a", tasks = 2}]'},
            "train lists 'a' twice",
        ),
        ({"magpie_temperatures": "[]"}, "[magpie] temperatures = [] must be a list of at least"),
        ({"magpie_top_n": "8"}, "[magpie] top_n = 8: prompts are not learnt"),
        ({"magpie_slots": "2", "prompts_train": "[]"}, "[magpie] writes prompts beside those of"),
        ({"evaluate_apart": '["x"]'}, "[evaluate] apart: 'x' is not held out"),
        ({"evaluate_apart": '["held_out.jsonl"]'}, "apart leaves no set for the mean"),
        ({"prompts_passage_tokens": "15"}, "passage_tokens = 15 must be at least 16"),
        ({"prompts_passage_tokens": "99"}, "passage_tokens = 99 is more than longest = 48"),
        ({"target_source": '""'}, "[target] source is missing"),
        ({"target_dtype": '"int8"'}, "[target] dtype = 'int8' must be one of bfloat16, float32"),
        ({"draft_layers": "[0]"}, "[draft] and [train] go together"),
        ({"draft_layers": "[0]", "train_batch": "2"}, "[train] steps is missing"),
        (
            {"draft_layers": "[0]", "train_steps": "2", "generate_top_n": "0"},
            "[generate] top_n = 0 keeps no probabilities",
        ),
        *(
            ({"draft_layers": "[0]", "train_steps": "2", key: value}, message)
            for key, value, message in (
                ("draft_layers", "3", "[draft] layers = 3 must be a list of layer numbers"),
                ("draft_layers", '"0"', "[draft] layers = '0' must be a list of layer numbers"),
                ("draft_layers", "[true]", "[draft] layers = [True] must be a list of layer"),
                ("draft_layers", "[0.0]", "[draft] layers = [0.0] must be a list of layer"),
                (
                    "draft_output_size",
                    "8e3",
                    "[draft] output_size = 8000.0 is not understood; give an integer",
                ),
                ("draft_family", "3", "[draft] family = 3 is not understood; give text"),
                (
                    "train_learning_rate",
                    '"1e-3"',
                    "[train] learning_rate = '1e-3' is not understood",
                ),
                ("train_learning_rate", "inf", "[train] learning_rate = inf must be a finite"),
                ("train_clip", "nan", "[train] clip = nan must be a finite number"),
                ("train_kl", '"1"', "[train] kl = '1' is not understood; give a number"),
                ("train_beta1", '"a"', "[train] beta1 = 'a' is not understood; give a number"),
                (
                    "train_length",
                    "5e2",
                    "[train] length = 500.0 is not understood; give an integer",
                ),
                ("train_batch", "1e1", "[train] batch = 10.0 is not understood; give an integer"),
                ("train_seed", "-1", "[train] seed = -1 must be at least 0"),
                ("train_seed", '"x"', "[train] seed = 'x' is not understood; give an integer"),
                ("train_rematerialise", '"no"', "[train] rematerialise = 'no' is not understood"),
                (
                    "train_held_out",
                    "0.1",
                    "[train] held_out = 0.1 is not understood; give an integer",
                ),
                ("train_compute", "[1]", "[train] compute = [1] must be one of"),
            )
        ),
    ],
)
def test_a_bad_value_is_named_with_its_section(tmp_path, change, message):
    with pytest.raises(InputError, match=re.escape(message)):
        tiny_run.settings(tmp_path, **change)


def test_recorded_settings_do_not_depend_on_paths(tmp_path):
    one = tiny_run.settings(tmp_path, "here", prompts_directory='"one"')
    two = tiny_run.settings(tmp_path, "there", prompts_directory='"two"')
    for section in ("target", "prompts", "generate"):
        values, other = (
            determining_values(section, getattr(settings, section)) for settings in (one, two)
        )
        assert values == other
    assert determining_values("prompts", one.prompts)["prompts.train"] == [
        "train.jsonl",
        "text.txt",
    ]
