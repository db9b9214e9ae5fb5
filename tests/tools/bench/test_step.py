from __future__ import annotations

import dataclasses
import io
import itertools
import json
import types

import jax
import numpy as np
import pytest
from rich.console import Console

from ssd_jax.tools.bench import bandwidth, report, step
from ssd_jax.tools.bench.bandwidth import Bandwidth


class Machine:
    """A clock, and forwards that advance it by 10 ms + 1 ms a token, times a drift; 2 ms of them
    before the call returns."""

    def __init__(self, drift: float = 0.0) -> None:
        self.now = 0.0
        self.log: list[int] = []
        self._drift = drift

    def clock(self) -> float:
        return self.now

    def forward(self, width: int):
        def wait() -> None:
            self.now += (0.008 + 0.001 * width) * (1 + self._drift * len(self.log))

        def dispatch():
            self.log.append(width)
            self.now += 0.002 * (1 + self._drift * len(self.log))
            return wait

        return dispatch


BANDWIDTH = Bandwidth(
    copy_gb_per_s=20.0, read_gb_per_s=15.0, buffer_bytes=1 << 30, cache_bytes=1 << 20, threads=2
)


def steps(machine: Machine, nbytes=110_000_000, **options) -> step.StepResult:
    return step.time_steps(
        machine.forward, **{"weight_bytes": lambda _: nbytes, "clock": machine.clock, **options}
    )


def test_each_width_has_its_time_ratio_and_bandwidth():
    result = steps(Machine(), repeats=8)
    assert [row.width for row in result.steps] == list(range(1, 18))
    for row in result.steps:
        assert row.ms.value == pytest.approx(10 + row.width)
        assert row.dispatch_ms.value == pytest.approx(2)
        assert row.ratio.value == pytest.approx((10 + row.width) / 11)
        assert row.gb_per_s == pytest.approx(110 / (10 + row.width))


def test_widths_take_turns_and_the_order_goes_back_and_forth():
    machine = Machine()
    steps(machine, widths=[1, 4, 8], repeats=3, warmup=2)
    assert machine.log[:6] == [1, 1, 4, 4, 8, 8]
    assert machine.log[6:] == [1, 4, 8, 8, 4, 1, 1, 4, 8]


def test_a_slowly_drifting_machine_does_not_bend_the_ratios():
    # Over the run the machine becomes 1.7 times as slow.
    result = steps(Machine(drift=0.7 / 357), repeats=20, warmup=1)
    for row in result.steps:
        assert row.ratio.value == pytest.approx((10 + row.width) / 11, rel=0.02)


def test_a_ratio_is_of_runs_of_one_round():
    """On a machine that is twice as slow every other round, which no ratio shows."""
    machine = Machine()
    widths = [1, 8]

    def forward(width):
        def wait() -> None:
            machine.now += (0.010 + 0.001 * width) * (1 + len(machine.log) // len(widths) % 2)
            machine.log.append(width)

        return lambda: wait

    result = step.time_steps(
        forward, weight_bytes=lambda _: 1, widths=widths, repeats=8, warmup=0, clock=machine.clock
    )
    ratio = result.steps[1].ratio
    assert [ratio.low, ratio.high] == pytest.approx([18 / 11, 18 / 11])


def test_all_widths_are_made_before_any_is_timed():
    machine, made = Machine(), []

    def forward(width):
        assert not machine.log
        made.append(width)
        return machine.forward(width)

    step.time_steps(
        forward, weight_bytes=lambda _: 1, widths=[1, 2], repeats=1, clock=machine.clock
    )
    assert made == [1, 2]


def test_the_table_says_what_bandwidth_is_compared():
    console = Console(width=100, file=io.StringIO(), color_system=None)
    console.print(step.step_table(steps(Machine(), repeats=6), BANDWIDTH))
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= 100
    assert "read 15.0 GB/s" in text
    assert "copy 20.0 GB/s (bytes read + bytes written)" in text
    assert "67%" in text  # width 1: 10 of 15 GB/s
    assert "one forward, 110 MB of weights a device" in text
    assert "cache" not in text
    assert "experts" not in text


def test_wider_forwards_may_read_more_weights():
    result = steps(Machine(), widths=[1, 10], repeats=6, weight_bytes=lambda width: width * 10**7)
    assert [row.weight_bytes for row in result.steps] == [10**7, 10**8]
    assert [row.gb_per_s for row in result.steps] == pytest.approx([10 / 11, 100 / 20])
    assert result.weight_bytes == 10**8
    console = Console(width=100, file=io.StringIO(), color_system=None)
    console.print(step.step_table(result, BANDWIDTH))
    text = console.file.getvalue()
    assert "one forward, 10 to 100 MB of weights a device" in text
    assert "of experts as many as tokens use" in text


def test_weights_that_fit_the_cache_are_pointed_out():
    console = Console(width=100, file=io.StringIO(), color_system=None)
    console.print(step.step_table(steps(Machine(), 1 << 19, repeats=6), BANDWIDTH))
    assert "may stay in the 1 MiB cache" in console.file.getvalue()


def test_the_json_has_every_width_and_the_bandwidth():
    document = report.document(
        "step",
        settings={"slots": 1},
        environment={"device": "x"},
        **dataclasses.asdict(steps(Machine(), repeats=6)),
        bandwidth=BANDWIDTH,
    )
    document = json.loads(json.dumps(document, allow_nan=False))
    assert set(document) == {
        "schema_version",
        "suite",
        "device",
        "settings",
        "weight_bytes",
        "repeats",
        "bandwidth",
        "steps",
    }
    assert [row["width"] for row in document["steps"]] == list(range(1, 18))
    figures = {"width", "ms", "dispatch_ms", "ratio", "weight_bytes", "gb_per_s"}
    assert set(document["steps"][0]) == figures
    assert document["bandwidth"]["read_gb_per_s"] == 15


@pytest.fixture
def half_second_runs(monkeypatch):
    """Whatever bandwidth times seems to take half a second."""
    ticks = itertools.count()
    clock = types.SimpleNamespace(perf_counter=lambda: 0.5 * next(ticks))
    monkeypatch.setattr(bandwidth, "time", clock)


@pytest.mark.usefixtures("half_second_runs")
def test_bandwidth_counts_both_ways_of_a_copy_and_one_of_a_read():
    size = 8 << 20
    found = bandwidth.measure_bandwidth(jax.devices()[0], buffer_bytes=size, repeats=2)
    # A copy reads half of the buffer and writes half, a read reads all: `size` bytes both.
    assert found.copy_gb_per_s == found.read_gb_per_s == pytest.approx(size / 0.5 / 1e9)
    assert found.buffer_bytes == size
    assert found.threads >= 1


def test_a_copy_writes_half_of_the_buffer_with_every_thread(monkeypatch):
    copied: list[tuple[int, int]] = []
    real = np.copyto

    def copyto(target, source):
        copied.append((target.nbytes, source.nbytes))
        real(target, source)

    monkeypatch.setattr(bandwidth.np, "copyto", copyto)
    found = bandwidth.measure_bandwidth(jax.devices()[0], buffer_bytes=1 << 20, repeats=1)
    runs = 2  # one untimed
    assert sum(target for target, _ in copied) == runs * (1 << 20) // 2
    assert len(copied) == runs * found.threads


@pytest.mark.usefixtures("half_second_runs")
def test_on_a_device_the_time_is_that_of_one_of_the_calls_in_flight():
    seconds = bandwidth._device_seconds(jax.devices()[0], 1 << 20, repeats=1)
    assert seconds == (0.5 / bandwidth.CALLS_IN_FLIGHT,) * 2


def test_shared_caches_count_once(tmp_path):
    for cpu, shared, size in [(0, "0-1", "4096K"), (1, "0-1", "4096K"), (2, "2", "1024K")]:
        for index, (level, kilobytes) in enumerate([(1, "32K"), (3, size)]):
            folder = tmp_path / f"cpu{cpu}" / "cache" / f"index{index}"
            folder.mkdir(parents=True)
            (folder / "level").write_text(f"{level}\n")
            (folder / "size").write_text(f"{kilobytes}\n")
            (folder / "shared_cpu_list").write_text(f"{shared}\n")
    assert bandwidth.cache_bytes([0, 1], root=tmp_path) == 4 << 20
    assert bandwidth.cache_bytes([0, 1, 2], root=tmp_path) == 5 << 20
    assert bandwidth.cache_bytes([7], root=tmp_path) is None
