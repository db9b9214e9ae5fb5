"""Starts of mode auto, with models whose speed in each mode is given."""

import pytest

from ssd_jax.config.config import Config
from ssd_jax.errors import SsdError
from ssd_jax.sampling.params import SamplingParams
from ssd_jax.system.cache_dir import cache_dir
from ssd_jax.tools.bench import starts
from tests.tools.bench import fakes

CONFIG = Config(target="target", mode="auto", draft="draft")
PARAMS = SamplingParams()


class Models:
    """Stands for `PinnedModel`: start after start, the mode that auto takes, and all speeds."""

    def __init__(self, made):
        self.made, self.busy, self.caches, self.open = iter(made), [], [], 0

    def __call__(self, config, params, *, cache):
        assert config is CONFIG
        self.caches.append(sorted(each.name for each in (cache / "ssd_jax").iterdir()))
        (cache / "ssd_jax" / "costs").mkdir(exist_ok=True)
        self.open += 1
        return Model(self, *next(self.made))


class Model:
    def __init__(self, models, taken, speeds):
        self.models, self.taken, self.speeds = models, taken, speeds

    def wait_ready(self):
        if self.speeds is None:
            raise SsdError("not enough memory")
        self.models.busy.append(bool(working))

    def variant(self, mode, k):
        assert k is None
        metrics = {"mode": self.taken if mode == "auto" else mode}
        speed = self.speeds[metrics["mode"]]
        return lambda prompt: fakes.result(range(9), tokens_per_second=speed, metrics=metrics)

    def close(self):
        self.models.open -= 1


working = []


class Process:
    def __init__(self, **_settings): ...

    def start(self):
        working.append(self)

    def kill(self):
        working.remove(self)

    def join(self): ...


@pytest.fixture(autouse=True)
def no_processes(monkeypatch, tmp_path):
    """Other work is only counted; the user's cache has costs and programs."""
    monkeypatch.setattr(
        starts.multiprocessing,
        "get_context",
        lambda _kind: type("Context", (), {"Process": Process}),
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("costs", "xla"):
        (cache_dir() / name).mkdir(parents=True)
        (cache_dir() / name / "file").write_text("kept")


def measured(models, count):
    return starts.measure(CONFIG, fakes.prompts(3), starts=count, params=PARAMS, start=models)


def test_the_first_and_every_second_start_load_beside_other_work_that_ends_before_prompts_run():
    models = Models([("sd", {"ar": 1.0, "sd": 2.0, "ssd": 1.5})] * 4)
    found, _ = measured(models, 4)
    assert models.busy == [each.disturbed for each in found] == [True, False, True, False]
    assert not working
    assert models.open == 0


def test_starts_have_the_users_programs_and_costs_of_their_own():
    models = Models([("sd", {"ar": 1.0, "sd": 2.0, "ssd": 1.5})] * 2)
    measured(models, 2)
    assert models.caches == [["xla"], ["costs", "xla"]]
    assert (cache_dir() / "costs" / "file").read_text() == "kept"
    assert (cache_dir() / "xla" / "file").read_text() == "kept"


def test_a_choice_is_compared_with_the_mode_that_was_fastest_over_all_starts():
    models = Models(
        [
            ("ar", {"ar": 9.0, "sd": 10.0, "ssd": 5.0}),
            ("sd", {"ar": 8.0, "sd": 12.0, "ssd": 5.0}),
            ("ar", {"ar": 11.0, "sd": 10.9, "ssd": 5.0}),
        ]
    )
    found, result = measured(models, 3)
    assert [each.taken for each in found] == ["ar", "sd", "ar"]
    assert [each.ratio for each in found] == pytest.approx([0.9, 1.0, 11 / 10.9])
    assert found[1].speeds == pytest.approx({"ar": 8.0, "sd": 12.0, "ssd": 5.0})
    assert result.variants == ("ar", "sd", "ssd")
    notes = starts.starts_table(found)._notes
    assert notes[-1] == "within 3% of it: 2 of 3 starts"


def test_a_model_that_cannot_be_loaded_leaves_nothing_running():
    models = Models([("sd", {"ar": 1.0, "sd": 2.0, "ssd": 1.5}), ("sd", None)])
    with pytest.raises(SsdError, match="not enough memory"):
        measured(models, 2)
    assert models.open == 0
    assert not working
