from __future__ import annotations

import json
import os
import sys

import pytest

from ssd_jax.cli.main import main
from ssd_jax.config.config import Config
from ssd_jax.errors import InputError, SsdError
from ssd_jax.sampling.params import SamplingParams
from ssd_jax.system import notices
from ssd_jax.system.cores import usable_cores
from ssd_jax.tools.bench.accounting import PinnedModel, core_groups, gains, measure
from ssd_jax.tools.bench.run import join_results
from tests.tools.bench import fakes

cores = pytest.mark.skipif(
    sys.platform != "linux" or len(usable_cores()) < 2, reason="two processor cores of Linux"
)
CONFIG = Config(
    target="target", mode="ssd", draft="draft", budget="8", saguaro_c=0.5, predict="plain"
)


def measured(models, count, config=CONFIG):
    """So many prompts in every mode."""
    given = {"groups": ((0, 1), (2,)), "ks": (2, 4), "params": SamplingParams(), "warmup": 0}
    return measure(config, fakes.prompts(count), start=models, **given)


class Models:
    """Stands for `PinnedModel`: a speed for each (mode, K, where the target runs)."""

    def __init__(self, speeds):
        self.speeds, self.opened, self.open, self.most = speeds, [], 0, 0

    def __call__(self, config, params, *, ks):
        self.opened.append((config.mode, config.draft, config.target_cores, config.draft_cores, ks))
        self.open += 1
        self.most = max(self.most, self.open)
        return Model(self, config)


class Model:
    def __init__(self, models, config):
        self.models, self.config = models, config

    def wait_ready(self):
        pass

    def variant(self, mode, k):
        name = "n-gram" if self.config.draft == "ngram" else mode
        speed = self.models.speeds[name, k, self.config.target_cores]
        return lambda prompt: fakes.result(range(prompt.index, 9), tokens_per_second=speed)

    def close(self):
        self.models.open -= 1


def speeds():
    found = {("n-gram", None, where): 11.0 for where in ("0,1", "2")}
    for where, factor in (("0,1", 1.0), ("2", 2.0), ("0,1,2", 1.8)):
        found["ar", None, where] = 10 * factor
        for k, sd, ssd in ((2, 15, 24), (4, 18, 20)):
            found["sd", k, where] = sd * factor
            found["ssd", k, where] = ssd * factor
    return found


def test_every_role_gets_both_groups_and_the_best_k_of_each_mode_counts():
    models = Models(speeds())
    result = measured(models, 6)
    assert models.opened == [
        ("sd", "draft", "0,1,2", None, (2, 4)),
        ("ssd", "draft", "0,1", "2", (2, 4)),
        ("sd", "ngram", "0,1", None, ()),
        ("ssd", "draft", "2", "0,1", (2, 4)),
        ("sd", "ngram", "2", None, ()),
    ]
    assert (models.open, models.most) == (0, 3)
    assert {len(runs.results) for runs in result.runs} == {2}
    paper, equal = gains(result)
    assert (paper.sd, paper.ssd) == ("sd k=4", "ssd k=2")
    # Each half has as many tokens: together 4/3 as fast as the slower one, or 1.8 on all cores.
    assert paper.over_sd.value == pytest.approx(24 / 18)
    assert paper.over_ar.value == pytest.approx(24 / 10)
    assert equal.sd == "sd k=4, all cores"
    assert equal.over_sd.value == pytest.approx(24 * (4 / 3) / (18 * 1.8))
    assert equal.over_ar.value == pytest.approx(24 * (4 / 3) / (10 * 1.8))


def test_models_are_closed_when_one_fails():
    models = Models({})  # no speed: making a variant fails
    with pytest.raises(KeyError):
        measured(models, 2)
    assert models.open == 0


def test_results_are_joined_by_prompt_and_variant():
    first, second = (measured(Models(speeds()), 3) for _ in range(2))
    both = join_results([first, second])
    assert [len(runs.results) for runs in both.runs] == [4] * len(first.runs)
    for one, other in zip(both.runs, first.runs, strict=True):
        assert (one.variant, one.prompt) == (other.variant, other.prompt)
        assert one.results[:2] == other.results


@cores
def test_cores_are_halves_or_as_given_and_never_shared():
    usable = sorted(usable_cores())
    first, second = core_groups(None, None)
    assert sorted([*first, *second]) == usable
    last = str(usable[-1])
    target, draft = core_groups(None, last)
    assert (target, draft) == (tuple(usable[:-1]), (usable[-1],))
    everything = ",".join(map(str, usable))
    for given in (
        (last, last),
        (everything, None),
        ("9999", None),
    ):
        with pytest.raises(InputError):
            core_groups(*given)


@pytest.mark.parametrize(
    ("flag", "says"),
    [
        ("--modes=ar,ssd", "compares ar, sd and ssd"),
        ("--draft_placement=inline", "a process of its own"),
    ],
)
def test_what_the_suite_cannot_do_is_refused_before_anything_is_opened(capsys, flag, says):
    assert main(["bench", "--suite=accounting", "--target=x", "--draft=y", flag]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.more
def test_a_model_that_cannot_be_opened_says_why(tmp_path):
    model = PinnedModel(Config(target=str(tmp_path / "nowhere")), SamplingParams())
    with pytest.raises(InputError, match="nowhere"):
        model.wait_ready()
    model.close()


def test_a_process_that_dies_is_an_error(tiny_checkpoint):
    model = PinnedModel(Config(target=str(tiny_checkpoint), compile_cache="off"), SamplingParams())
    os.kill(model._process.pid, 9)
    with pytest.raises(SsdError, match="exit status -9"):
        model.wait_ready()
    with pytest.raises(SsdError, match="exit status -9"):
        model.variant("ar", None)(fakes.prompts(1)[0])
    model.close()


@pytest.mark.more
def test_what_a_process_has_said_no_later_one_says_again(tiny_checkpoint, capfd, monkeypatch):
    monkeypatch.setattr(notices, "_logged", {})
    of = {"mode": "sd", "draft": "ngram", "k": "1", "dtype": "float32", "context": 64}
    config = Config(target=str(tiny_checkpoint), compile_cache="off", **of)
    for _ in range(2):
        model = PinnedModel(config, SamplingParams())
        model.wait_ready()
        model.close()
    assert capfd.readouterr().err.count("exact = 'auto' is distribution") == 1


@cores
@pytest.mark.slow
def test_the_suite_measures_a_tiny_model_in_processes_of_its_own(tiny_checkpoint, tmp_path, capsys):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": f"prompt {i}"}) for i in range(2)))
    arguments = [
        "bench",
        "--suite=accounting",
        f"--target={tiny_checkpoint}",
        f"--draft={tiny_checkpoint}",
        f"--prompts={prompts}",
        "--ks=2",
        "--budget=4",
        "--dtype=float32",
        "--context=300",
        "--max_tokens=9",
        "--ignore_eos",
        "--json",
    ]
    assert main(arguments) == 0
    result = json.loads(capsys.readouterr().out)
    names = ["ar", "n-gram", "sd k=2", "ssd k=2", "ar, all cores", "sd k=2, all cores"]
    assert [each["variant"] for each in result["variants"]] == names
    assert [each["identical"] for each in result["variants"]] == [2] * 6
    assert [gain["name"] for gain in result["gains"]] == ["paper accounting", "equal hardware"]


def test_settings_of_ssd_alone_are_left_out_of_the_other_modes():
    config = Config(
        target="t", draft="d", mode="ssd", k="2", draft_workers=2, draft_placement="process"
    )
    models = Models(speeds())
    measured(models, 6, config)
    assert {mode for mode, *_ in models.opened} == {"sd", "ssd"}


def test_suites_that_run_programs_by_themselves_are_refused_with_hosts(capsys):
    assert main(["bench", "--suite=step", "--target=x", "--hosts=10.0.0.1:4000,count=2"]) == 2
    assert "those of hosts only run together" in capsys.readouterr().err
