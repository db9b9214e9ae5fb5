"""`ssd-jax distill --stage=evaluate`, by itself and at the end of a whole run."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ssd_jax.checkpoints.drafts import shipped
from ssd_jax.cli.main import main
from ssd_jax.errors import InputError
from ssd_jax.testing import tiny
from ssd_jax.tools.distill import evaluate as evaluation
from ssd_jax.tools.distill.evaluate import choose
from ssd_jax.tools.distill.prompt_ids import PromptIds
from ssd_jax.tools.distill.rounds import MeasuredDraft
from ssd_jax.tools.distill.settings import EvaluateSettings
from ssd_jax.tools.distill.step_costs import StepCosts
from tests.checkpoints import tiny_drafts
from tests.tools.distill import tiny_run
from tests.tools.distill.fake_target import FakeTarget

SETTINGS = {
    "prompts_held_out": '["held_out.jsonl", "other.jsonl"]',
    "generate_completions": "2",
    "generate_top_n": "0",
    "evaluate_prompts": "2",
    "evaluate_max_tokens": "10",
    "evaluate_ks": "[1, 2]",
    "evaluate_budgets": "[2]",
    "evaluate_repeats": "2",
}
TRAINED = {
    "draft_layers": "[0]",
    "train_steps": "1",
    "train_cross_entropy": "1.0",
    "train_kl": "0.0",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    directory = tiny_run.write_data(tmp_path_factory.mktemp("evaluate"))
    others = [{"question": f"{i * 'x'}y{i}?"} for i in range(3)]
    tiny_run.write_lines(directory / "other.jsonl", *others)
    return directory


@pytest.fixture(scope="module")
def draft(place, tiny_checkpoint):
    target = tiny_drafts.open_target(tiny_checkpoint)
    ids = np.arange(0, tiny.TOKENS, 2)
    ids = np.unique([*ids, tiny.EOS, tiny.END_OF_TURN])
    return tiny_drafts.write(place / "draft", target, ids, noise=0.05, layers=2)


def distill(place, target, *arguments, **changes) -> int:
    config = tiny_run.write_config(place, target, **SETTINGS | changes)
    given = [f"--config={config}", f"--out={place / 'out'}", "--compile_cache=off"]
    return main(["distill", *given, *arguments])


@pytest.fixture(scope="module")
def evaluated(place, draft, tiny_checkpoint):
    """Figures of a draft that was given, and their file; the text is a stand-in's."""
    assert distill(place, tiny_checkpoint, "--stage=prompts") == 0
    given = ("--stage=evaluate", f"--draft={draft}")
    with pytest.MonkeyPatch.context() as patch:
        fake = FakeTarget().install(patch)
        assert distill(place, tiny_checkpoint, *given) == 0
    assert sorted(fake.answered) == list(range(8))  # two texts of each prompt
    (path,) = (place / "out" / "config").glob("evaluation-*.json")
    return json.loads(path.read_text()), path


@pytest.mark.more
def test_figures_are_there_for_each_set_and_as_mean(evaluated):
    document, _ = evaluated
    sets, mean = document["sets"], document["mean"]
    assert [(name, one["prompts"]) for name, one in sets.items()] == [
        ("held_out.jsonl", 2),
        ("other.jsonl", 2),
    ]
    for name in ("greedy_agreement", "overlap"):
        values = [one[name] for one in sets.values()]
        assert mean[name] == pytest.approx(np.mean(values))
        assert all(0 <= value <= 1 for value in values)
    assert mean["tokens_per_call"].keys() == {
        "greedy",
        "greedy_all_hits",
        "sampled",
        "sampled_all_hits",
    }
    for one in (*sets.values(), mean):
        for by_k in one["tokens_per_call"].values():
            assert list(by_k) == ["1", "2"]
            assert 1 <= by_k["1"] <= by_k["2"] <= 3
        assert one["predicted"]["sampled"]["ssd"]["budget"] == 2
    assert list(document["steps"]["target"]) == ["1", "2", "3"]
    assert list(document["steps"]["draft"]) == ["1", "2"]


def test_a_draft_whose_logits_are_no_numbers_gets_no_figures(
    place, draft, tiny_checkpoint, tmp_path, monkeypatch, capsys
):
    broken = shutil.copytree(draft, tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    save_file(
        {k: v if v.dtype.kind == "i" else v * np.nan for k, v in tensors.items()},
        broken / "model.safetensors",
    )
    FakeTarget().install(monkeypatch)
    out = f"--out={tmp_path / 'out'}"
    assert distill(place, tiny_checkpoint, "--stage=prompts", out) == 0
    assert distill(place, tiny_checkpoint, "--stage=evaluate", f"--draft={broken}", out) == 2
    assert f"draft {broken} gives logits that are no numbers" in capsys.readouterr().err
    assert not list((tmp_path / "out" / "config").glob("evaluation*"))


@pytest.mark.more
def test_text_and_figures_of_an_evaluation_are_kept(
    evaluated, place, draft, tiny_checkpoint, monkeypatch, capsys
):
    document, path = evaluated
    monkeypatch.setattr("ssd_jax.llm.llm.LLM", None)
    given = ("--stage=evaluate", f"--draft={draft}")
    assert distill(place, tiny_checkpoint, *given, evaluate_ks="[2]") == 0
    again = json.loads(path.read_text())  # other figures of the same text
    assert again["sets"]["other.jsonl"]["overlap"] == document["sets"]["other.jsonl"]["overlap"]
    assert list(again["mean"]["tokens_per_call"]["greedy"]) == ["2"]
    monkeypatch.setattr("ssd_jax.tools.distill.evaluate.judge", None)
    capsys.readouterr()
    assert distill(place, tiny_checkpoint, *given, evaluate_ks="[2]") == 0
    shown, stderr = capsys.readouterr()
    assert "tokens per call of the target" in shown
    assert f"evaluate: {path}" in stderr
    assert f"{again['mean']['overlap']:.3f}" in shown


@pytest.mark.more
def test_a_whole_run_ends_with_the_trained_draft(
    evaluated, place, draft, tiny_checkpoint, monkeypatch
):
    from ssd_jax.tools.distill.training import loop

    def train(settings, _draft, *, samples, work, **_rest):
        assert len(list(samples)) == 2
        made = Path(shutil.copytree(draft, work / "draft"))
        return loop.Result(step=settings.steps, stop_reason="", held_out={}, draft=made)

    monkeypatch.setattr(loop, "run", train)
    FakeTarget().install(monkeypatch)
    assert distill(place, tiny_checkpoint, **TRAINED) == 0
    found = json.loads((place / "out" / "config" / "evaluation.json").read_text())
    document, _ = evaluated
    for name, one in document["sets"].items():
        for figure in ("greedy_agreement", "overlap", "tokens_per_call", "tokens"):
            assert found["sets"][name][figure] == one[figure]


@pytest.mark.parametrize(
    ("arguments", "changes", "message"),
    [
        (("--stage=evaluate",), {}, "stage train has made none in"),
        (("--stage=generate", "--draft=x"), {}, "draft = 'x' is for stage evaluate"),
        (("--stage=evaluate", "--draft=default"), {}, "no draft comes with ssd_jax"),
        (("--stage=evaluate", "--draft={target}/no"), {}, "/no"),
        (("--draft={other}",), {}, "made for"),
        ((), {"evaluate_sets": '["train.jsonl"]'}, "sets: 'train.jsonl' is not held out"),
        ((), {"evaluate_sets": "[1]"}, "sets = [1] must be a list of held-out sets"),
        ((), {"evaluate_ks": "[0]"}, "[evaluate] ks = [0] must list integers from 1 to 16"),
        ((), {"evaluate_ks": "[]"}, "ks = [] must list"),
        ((), {"evaluate_budgets": "[1]"}, "budgets = [1] must list integers from 2"),
        ((), {"evaluate_prompts": "0"}, "[evaluate] prompts = 0 must be at least 1"),
        ((), {"evaluate_max_tokens": "3"}, "max_tokens = 3 leaves no room for ks = [1, 2]"),
        ((), {"evaluate_promts": "3"}, "unknown key 'promts'; did you mean 'prompts'?"),
    ],
)
def test_impossible_evaluations_are_refused_before_anything_is_made(
    place, tiny_checkpoint, tmp_path, capsys, arguments, changes, message
):
    other = tmp_path / "other"
    if "{other}" in "".join(arguments):
        another = tiny_drafts.open_target(tiny.write_checkpoint(tmp_path / "target", seed=3))
        tiny_drafts.write(other, another, None, seed=3)
    filled = [one.format(target=tiny_checkpoint, other=other) for one in arguments]
    out = tmp_path / "out"
    assert distill(place, tiny_checkpoint, *filled, f"--out={out}", **changes) == 2
    assert message in capsys.readouterr().err
    assert not [path for path in out.rglob("*") if path.name != ".lock"]


EVALUATION = """
[target]
source = "{target}"
dtype = "float32"
[prompts]
held_out = ["held_out.jsonl"]
longest = 48
passage_tokens = 24
[evaluate]
max_tokens = 10
ks = [1, 2]
budgets = [2]
repeats = 2
"""


@pytest.mark.more
def test_a_draft_of_the_package_is_evaluated_without_prompts_to_train(
    place, tiny_checkpoint, tmp_path, monkeypatch, capsys
):
    target = tiny_drafts.open_target(tiny_checkpoint)
    tiny_drafts.write(tmp_path / "drafts" / "light", target, None, noise=0.05, layers=1)
    tiny_drafts.write(tmp_path / "drafts" / "tiny", target, None, noise=0.05, layers=2)
    monkeypatch.setattr(shipped, "DIRECTORY", tmp_path / "drafts")
    costs = StepCosts(target_ms=1.0, target={1: 1.0, 2: 1.1, 3: 1.2}, draft={1: 0.1, 2: 0.2})
    monkeypatch.setattr("ssd_jax.tools.distill.evaluate.measure_steps", lambda *_a, **_k: costs)
    config, out = tmp_path / "evaluation.toml", tmp_path / "out"
    config.write_text(EVALUATION.format(target=tiny_checkpoint))
    given = [f"--config={config}", f"--data={place}", f"--out={out}", "--compile_cache=off"]
    FakeTarget().install(monkeypatch)
    assert main(["distill", *given, "--draft=default"]) == 0
    assert sorted(path.name for path in out.iterdir() if path.is_dir()) == [
        "evaluate",
        "evaluation",
        "prompts",
    ]
    (path,) = (out / "evaluation").iterdir()
    found = json.loads(path.read_text())
    assert found["draft"] == str(tmp_path / "drafts" / "light")
    assert list(found["sets"]) == ["held_out.jsonl"]
    before = path.stat()
    monkeypatch.chdir(tmp_path)
    for same in ("default", "light", "drafts/light/"):  # prompts are read again, figures are kept
        assert main(["distill", *given, f"--draft={same}"]) == 0
    assert [file.stat() for file in path.parent.iterdir()] == [before]
    capsys.readouterr()
    assert main(["distill", *given, "--stage=generate"]) == 2
    assert "lists no prompts to train on" in capsys.readouterr().err
    assert main(["distill", *given]) == 2
    assert "say which one, with --draft=SOURCE" in capsys.readouterr().err


def test_other_text_is_refused_with_its_keys(evaluated, place, draft, tiny_checkpoint, capsys):
    given = ("--stage=evaluate", f"--draft={draft}")
    assert distill(place, tiny_checkpoint, *given, evaluate_max_tokens="11") == 2
    assert "evaluate.max_tokens is 11, was 10" in capsys.readouterr().err


def test_text_for_another_number_of_slots_is_refused(
    evaluated, place, draft, tiny_checkpoint, capsys
):
    """Where its tokens are nearly as likely, it may be another text."""
    given = ("--stage=evaluate", f"--draft={draft}")
    assert distill(place, tiny_checkpoint, *given, generate_slots="2") == 2
    assert "generate.slots is 2, was 3" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("what", "other"),
    [
        ("dtype_of_draft", "bfloat16"),
        pytest.param("cpu_affinity", [4000], marks=pytest.mark.more),
        pytest.param("surroundings", "other versions", marks=pytest.mark.more),
    ],
)
def test_figures_of_a_draft_in_another_dtype_or_on_other_cores_are_made_again(
    evaluated, place, draft, tiny_checkpoint, monkeypatch, capsys, what, other
):
    def judge(*_models, **_about):
        raise InputError("they are made")

    monkeypatch.setattr(evaluation, "judge", judge)
    given = ("--stage=evaluate", f"--draft={draft}")
    _, path = evaluated
    made_of = json.loads(path.read_text())["made_of"]
    settings = {f"evaluate_{name}": json.dumps(made_of[name]) for name in ("ks", "budgets")}
    assert distill(place, tiny_checkpoint, *given, **settings) == 0
    monkeypatch.setattr(evaluation, what, lambda *_about, **_more: other)
    assert distill(place, tiny_checkpoint, *given, **settings) == 2
    assert "they are made" in capsys.readouterr().err


def test_predictions_take_the_acceptance_of_the_longest_proposals(monkeypatch):
    seen = []
    fan_out = evaluation.GeometricFanOut

    def noted(**about):
        seen.append(about)
        return fan_out(**about)

    monkeypatch.setattr(evaluation, "GeometricFanOut", noted)
    measured = MeasuredDraft(by_length=((0.9,), (0.8, 0.4)), single_miss=0.5, r=0.3)
    costs = StepCosts(target_ms=1.0, target={1: 1.0, 3: 1.2}, draft={1: 0.1, 2: 0.2})
    settings = EvaluateSettings(ks=(2,), budgets=(2,))
    evaluation._predict({"sampled": measured}, settings, costs)
    assert seen == [{"acceptance": pytest.approx(0.6), "r": 0.3}]


def test_prompts_are_spread_over_their_set():
    prompts = [PromptIds(set=name, index=i, ids=[1]) for name in "ab" for i in range(9)]
    chosen = choose(prompts, EvaluateSettings(prompts=3))
    assert [(one.set, one.index) for one in chosen] == [(s, i) for s in "ab" for i in (0, 3, 6)]
    assert len(choose(prompts, EvaluateSettings(sets=("b",)))) == 9
    with pytest.raises(InputError, match="no held-out prompt of 'c' is left"):
        choose(prompts, EvaluateSettings(sets=("c",)))
