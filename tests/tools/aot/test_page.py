"""The page of `ssd-jax aot`: what it shows of modes that fit, and of those that do not."""

import io

from rich.console import Console

from ssd_jax.speculation.fan_out import UniformFanOut
from ssd_jax.tools.aot.modes import Mode
from ssd_jax.tools.aot.page import build_page
from tests.tools.aot import costs as given


def page(*modes):
    """Its lines."""
    console = Console(width=120, file=io.StringIO(), color_system=None)
    fan_out = UniformFanOut()
    for section in build_page(
        modes, given.CHIP, given.SIZES, fan_out, title="a pair", where="8 v6e"
    ):
        console.print(section, soft_wrap=True)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_a_page_has_each_requested_program_once():
    lines = page(given.AR, given.SD, given.SSD)
    assert lines[0] == "a pair"
    assert lines[-1].startswith("SSD pays on 8 v6e at acceptances of ")
    for start in ("ar 8: target ", "sd 8: target and draft ", "ssd 4 + 4: target "):
        assert sum(line.startswith(start) for line in lines) == 1
    for start in (
        "target on 8  forward 4",
        "target on 4  forward 4",
        "draft on 4   expand 4 sampled",
    ):
        assert sum(line.startswith(start) for line in lines) == 1
    assert not [line for line in lines if "draft on 8   expand" in line]
    rate = given.AR.rate(0.6, given.SIZES, UniformFanOut())
    assert [line.split()[2:] for line in lines if line.startswith("ar 8  ")] == [
        [f"{rate:.0f}"] * 4
    ]


def test_programs_whose_own_size_is_not_known_have_their_columns():
    """Those for GPUs."""
    assert given.AR.target.programs["forward", 0].code == 0
    (memory,) = [line for line in page(given.AR) if line.startswith("ar 8: target ")]
    assert memory.split()[3:] == ["0.00"] * 5 + ["yes"]
    refused = Mode(name="ar", target=given.part("target", 8, {}, refused="no room"))
    (memory,) = [line for line in page(refused) if line.startswith("ar 8: target ")]
    assert memory.split()[3:] == ["0.00"] * 3 + ["no"]


def test_a_mode_that_does_not_fit_has_no_speed_and_says_why():
    refused = given.part("target", 4, {}, refused="forward 4: no room", notes=("a note",))
    split = Mode(name="ssd", target=refused, draft=given.SSD.draft)
    lines = page(given.AR, given.SD, split)
    assert "ssd 4 + 4 does not fit: target on 4: forward 4: no room" in lines
    assert "target on 4: a note" in lines
    assert not [line for line in lines if line.startswith("ssd 4 + 4  ")]
    (memory,) = [line for line in lines if line.startswith("ssd 4 + 4: target ")]
    assert memory.endswith(" no")
    assert lines[-1] == "SSD does not pay on 8 v6e: no split of it holds both models"
