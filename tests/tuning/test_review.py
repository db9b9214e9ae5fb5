"""Known costs that hold, and those that are measured again."""

import pytest

from ssd_jax.config.config import Config
from ssd_jax.engine.rounds.timer import TimedRound
from ssd_jax.speculation.fan_out import VerificationStats
from ssd_jax.tuning.chooser import Chooser
from ssd_jax.tuning.cost_file import CostFile, KnownCosts
from ssd_jax.tuning.review import OFF, RoundTimes, correct_costs, review_costs
from ssd_jax.tuning.throughput import Costs, Guess

AR, SD = 1.0, 1.2
WIDTHS = (0, 1)


class Machine:
    """Starts of models on a machine where other work may run, and the file of their costs.

    With a draft for which two tokens of three are accepted, sd is 1.4 times as fast as ar.

    Attributes:
      busy: by part, how many times as long as alone it takes now.
      measured: how often all costs were measured.
    """

    def __init__(self, directory):
        self.file = CostFile(directory, {"machine": 1})
        self.busy = {"ar": 1.0, "sd": 1.0}
        self.measured = 0

    def check(self):
        verify = dict.fromkeys(WIDTHS, AR * self.busy["sd"])
        return Costs(verify=verify, ahead=AR * self.busy["ar"])

    def measure(self):
        self.measured += 1
        target = self.check()
        return Costs(verify=target.verify, ahead=target.ahead, rounds={1: SD * self.busy["sd"]})

    def start(self, *, load=1.0, ar=1.0, run=1.0, rounds=100, sampled=False):
        """The chooser of a start, after its texts.

        Args:
          load, run: how busy the machine is while costs are measured, and while texts are made.
          ar: how much more busy it is while ar is measured.
          sampled: the texts are sampled under the ratio rule.
        """
        self.busy = {"ar": load * ar, "sd": load}
        known = self.file.read(widths=WIDTHS, budgets=())
        if known is None:
            known = KnownCosts(self.measure(), Guess(acceptance=2 / 3))
        else:
            known = review_costs(known, check=self.check, measure=self.measure)
        self.file.write(known)
        config = Config(mode="auto", target="t", draft="ngram", k="1")
        chooser = Chooser(config, known, budgets=(), file=self.file)
        if sampled:
            chooser.freeze_observations()
        tuner = None if chooser.mode == "ar" else chooser.tuner(chooser.mode, 1)
        timer = chooser.timer(chooser.mode, 1)
        for _ in range(rounds):
            seconds, proposed = (SD * run, 1) if tuner else (AR * run, 0)
            timer._report(TimedRound(proposed, False, seconds))
        chooser.close()
        return chooser

    @property
    def known(self):
        return self.file.read(widths=WIDTHS, budgets=())


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def test_good_costs_are_measured_once_and_serve_every_start(machine):
    for _ in range(4):
        assert machine.start(load=1.1, run=0.95).mode == "sd"
    assert machine.measured == 1
    assert not machine.known.doubted


def test_a_first_start_beside_other_work_is_not_kept(machine):
    """Whether its own rounds, or only the next start, can show it."""
    for rounds in (0, 100):
        machine.file.path.unlink(missing_ok=True)
        first = machine.start(load=1.6, rounds=rounds)
        assert first.predicted["ar"].rate == pytest.approx(1 / 1.6)
        second = machine.start(rounds=rounds)
        assert machine.known.costs.ahead == AR
        assert second.predicted["ar"].rate == pytest.approx(1)


def test_a_mode_that_was_measured_slow_and_never_ran_is_measured_again(machine):
    """Rounds of sd say nothing of ar; the next start does."""
    machine.start(ar=3.0)
    slow = machine.known
    assert slow.costs.ahead == 3 * AR
    assert not slow.doubted  # sd ran as predicted
    machine.start()
    assert machine.known.costs.ahead == AR


@pytest.mark.parametrize("sampled", [False, True])
def test_a_later_start_beside_other_work_spoils_nothing(machine, sampled):
    machine.start(sampled=sampled)
    good = machine.known.costs
    busy = machine.start(load=1.8, run=1.0, sampled=sampled)
    assert busy.predicted["ar"].rate == pytest.approx(1)
    assert machine.known.costs == good
    machine.start(sampled=sampled)
    assert machine.known.costs == good
    assert not machine.known.doubted


@pytest.mark.parametrize("sampled", [False, True])
def test_a_machine_that_has_become_slower_is_believed_at_the_second_start(machine, sampled):
    machine.start(sampled=sampled)
    slower = {"load": 1.8, "run": 1.8, "sampled": sampled}
    machine.start(**slower)
    assert machine.known.costs.ahead == AR
    assert machine.known.doubted
    machine.start(**slower)
    assert machine.known.costs.ahead == pytest.approx(1.8 * AR)
    measured = machine.measured
    machine.start(**slower)
    assert machine.measured == measured


def test_busy_texts_make_the_next_start_measure_again_and_that_is_all(machine):
    machine.start(run=1.5)
    assert machine.known.doubted
    assert machine.start().mode == "sd"
    assert machine.measured == 2
    machine.start()
    assert machine.start().predicted["ar"].rate == pytest.approx(1)
    assert not machine.known.doubted
    measured = machine.measured
    machine.start()
    assert machine.measured == measured


def test_rounds_that_always_take_longer_correct_the_prediction_and_are_measured_once(machine):
    """As those of long texts do."""
    for _ in range(4):
        last = machine.start(run=1.4)
    assert machine.measured == 2
    assert last.predicted["ar"].rate == pytest.approx(1 / 1.4)


def test_corrections_favour_no_mode(machine):
    machine.start(run=1.2)
    found = machine.start(run=1.2)
    rates = {mode: prediction.rate for mode, prediction in found.predicted.items()}
    assert rates["ar"] == pytest.approx(1 / 1.2)
    assert rates["sd"] / rates["ar"] == pytest.approx((5 / 3) / SD)


def test_rounds_beside_sampled_ones_under_the_ratio_rule_tell_the_next_start_nothing(machine):
    """Through time they depend on noise that a request of the next start may share."""
    machine.start(rounds=0)
    before = machine.known
    machine.start(run=2.0, sampled=True)
    assert machine.known == before


def test_rounds_before_the_first_sampled_request_count(tmp_path):
    file = CostFile(tmp_path, {})
    known = KnownCosts(Costs(verify={0: 1.0, 1: 1.0}), Guess())
    chooser = Chooser(
        Config(mode="auto", target="t", draft="ngram", k="1"), known, budgets=(), file=file
    )
    timer = chooser.timer("ar", 0)
    for _ in range(50):
        timer._report(TimedRound(0, False, 2.0, "ar"))
    chooser.freeze_observations()
    for _ in range(500):
        timer._report(TimedRound(0, False, 9.0, "ar"))
    chooser.close()
    found = file.read(widths=WIDTHS, budgets=())
    assert found.slowness == pytest.approx(2.0)
    assert found.doubted


def test_costs_that_another_process_has_measured_meanwhile_stay(machine):
    machine.start(rounds=0)
    chooser = Chooser(
        Config(mode="auto", target="t", draft="ngram", k="1"),
        machine.known,
        budgets=(),
        file=machine.file,
    )
    other = KnownCosts(Costs(verify={0: 5.0, 1: 5.0}, ahead=5.0), Guess())
    machine.file.write(other)
    tuner, timer = chooser.tuner("sd", 1), chooser.timer("sd", 1)
    for _ in range(50):
        tuner.observe(VerificationStats(1, 1, "miss"))
        timer._report(TimedRound(1, False, 2 * SD))
    chooser.close()
    assert machine.known.costs == other.costs
    assert not machine.known.doubted
    assert machine.known.guess.acceptance > other.guess.acceptance


@pytest.mark.parametrize(
    ("slowness", "seen", "doubted"),
    [
        (None, {"ar": OFF - 0.01}, False),
        (None, {"ar": OFF}, True),
        (None, {"ar": 1 / OFF}, True),
        (1.4, {"sd": 1.5}, False),
        (1.4, {"sd": 1.0}, True),
        (None, {"ar": 1.0, "sd": 1.4}, True),
    ],
)
def test_a_mode_that_is_off_by_a_quarter_raises_doubts(slowness, seen, doubted):
    known = KnownCosts(Costs(verify={0: 1.0}), Guess(), slowness)
    assert correct_costs(known, seen).doubted == doubted


def test_a_few_rounds_tell_nothing():
    times = RoundTimes()
    for _ in range(31):
        times.observe("ar", 3.0, 1.0)
    assert times.slowness == {}
    times.observe("ar", 3.0, 1.0)
    assert times.slowness == {"ar": 3.0}


def test_each_verification_is_checked(machine):
    """Wide ones may be slow where narrow ones are not."""
    machine.start(rounds=0)
    costs = machine.known.costs
    wide = Costs(verify={0: AR, 1: 1.3 * AR}, ahead=AR)
    assert (
        review_costs(machine.known, check=lambda: costs, measure=machine.measure) == machine.known
    )
    assert review_costs(machine.known, check=lambda: wide, measure=lambda: wide).doubted
