"""Processor cores: what users may write, and what is refused before anything loads."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ssd_jax import LLM
from ssd_jax.config.config import Config
from ssd_jax.errors import InputError
from ssd_jax.system.cores import Cores, parse_numbers, require_usable, usable_cores

linux = pytest.mark.skipif(sys.platform != "linux", reason="processor cores of Linux")
SSD = {"mode": "ssd", "draft": "a path", "draft_placement": "process"}


@pytest.mark.parametrize(
    ("text", "cores"),
    [("0", (0,)), ("3,1", (1, 3)), ("0-2", (0, 1, 2)), ("1, 4-5", (1, 4, 5)), ("2,2-2", (2,))],
)
def test_cores_are_lists_and_ranges(text, cores):
    assert parse_numbers("draft_cores", text, "core") == cores


@pytest.mark.parametrize("text", ["", "a", "-1", "2-1", "1,,2", "1-", "0x1", "1-2-3", "9999999"])
def test_a_malformed_list_of_cores_is_refused_with_an_example(text):
    with pytest.raises(InputError, match=r"target_cores = .* such as 0,2-3"):
        Config(target_cores=text)


def test_cores_of_both_roles_are_refused_by_name():
    with pytest.raises(InputError, match="target_cores = '0-2' and draft_cores = '2-3' share 2"):
        Config(target_cores="0-2", draft_cores="2-3", **SSD)
    assert Config(target_cores="0-1", draft_cores="2-3", **SSD).cores.draft == (2, 3)


@pytest.mark.parametrize("placement", ["inline", "submesh"])
def test_a_draft_in_the_same_process_has_no_cores_of_its_own(placement):
    with pytest.raises(InputError, match="is for draft_placement = 'process'"):
        Config(draft_cores="1", **SSD | {"draft_placement": placement})


@linux
def test_a_core_that_does_not_exist_is_named_with_those_that_do():
    there = sorted(usable_cores())
    usable = ",".join(str(core) for core in there)
    with pytest.raises(InputError, match=f"no core 4000 to run on; there are {usable}"):
        require_usable("draft_cores", (there[0], 4000))


@linux
def test_looking_at_cores_changes_nothing():
    before = os.sched_getaffinity(0)
    assert usable_cores() == before
    assert os.sched_getaffinity(0) == before
    assert Cores(target=None, draft=None).pin_target()[0] is None
    assert os.sched_getaffinity(0) == before


PLACE = """
import os, sys, threading
sys.path.insert(0, {root!r})
from ssd_jax.system.cores import Cores, usable_cores
first, *others = sorted(usable_cores())
wait = threading.Event()
thread = threading.Thread(target=wait.wait)
thread.start()
print(Cores(target=(first,), draft=None).pin_target()[0] == (tuple(others) or None))
print(Cores(target=(first,), draft=None).pin_target()[0] == (tuple(others) or None))
print([os.sched_getaffinity(int(t)) for t in os.listdir("/proc/self/task")] == [{{first}}] * 2)
wait.set()
"""


GIVEN = """
import os, sys
sys.path.insert(0, {root!r})
allowed = set(sorted(os.sched_getaffinity(0))[:{count}])
os.sched_setaffinity(0, allowed)
from ssd_jax.errors import InputError
from ssd_jax.system.cores import Cores, pin, usable_cores
{do}
"""


def run(count, do):
    """Lines that a process prints which was started on some cores."""
    code = GIVEN.format(root=str(Path(__file__).parents[2]), count=count, do=do)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.split()


two_cores = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2, reason="needs 2 cores"
)


@two_cores
def test_a_process_stays_on_the_cores_that_it_was_started_on():
    """As with taskset; the others may belong to somebody else."""
    other = max(os.sched_getaffinity(0))
    do = f"""
print(usable_cores() == allowed)
try:
    Cores(target=({other},), draft=None).pin_target()
except InputError as error:
    print("no core {other} to run on" in str(error))
print(os.sched_getaffinity(0) == allowed)
"""
    assert run(1, do) == ["True"] * 3


@two_cores
def test_cores_of_a_draft_alone_are_left_to_it():
    do = """
first, *others = sorted(allowed)
print(Cores(target=None, draft=(first,)).pin_target()[0] == (first,))
print(os.sched_getaffinity(0) == {*others})
print(Cores(target=None, draft=tuple(sorted(allowed))).pin_target()[0] == tuple(sorted(allowed)))
print(os.sched_getaffinity(0) == {*others})
"""
    assert run(2, do) == ["True"] * 4


@linux
def test_cores_are_remembered_also_by_a_process_that_was_only_pinned():
    do = "pin([min(allowed)]); print(usable_cores() == allowed)"
    assert run(2, do) == ["True"]


@linux
def test_the_target_is_pinned_whole_and_the_draft_gets_what_it_leaves_also_the_second_time():
    code = PLACE.format(root=str(Path(__file__).parents[2]))
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == ["True"] * 3


@two_cores
@pytest.mark.parametrize("later", ["first", "other"])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_latest_of_several_pins_counts_until_all_are_undone(later, order):
    do = f"""
first, other = sorted(allowed)
undo = pin([first]), pin([{later}])
print(os.sched_getaffinity(0) == {{{later}}})
undo[{order[0]}]()
print(os.sched_getaffinity(0) == {{(first, {later})[{order[1]}]}})
undo[{order[1]}]()
print(os.sched_getaffinity(0) == allowed)
"""
    assert run(2, do) == ["True"] * 3


@linux
def test_cores_are_given_back_by_close_and_by_a_constructor_that_fails(tiny_checkpoint):
    """Also those of threads that started meanwhile; a thread that was moved stays."""
    given = os.sched_getaffinity(0)
    if len(given) < 2:
        pytest.skip("needs two cores")
    first = min(given)
    settings = {"target_cores": str(first), "dtype": "float32", "load": False}
    ended = threading.Event()
    try:
        with LLM(str(tiny_checkpoint), compile_cache="off", **settings):
            assert os.sched_getaffinity(0) == {first}
            late, moved = (threading.Thread(target=ended.wait) for _ in range(2))
            late.start()
            moved.start()
            os.sched_setaffinity(moved.native_id, {max(given)})
            assert os.sched_getaffinity(late.native_id) == {first}
        assert os.sched_getaffinity(0) == os.sched_getaffinity(late.native_id) == given
        assert os.sched_getaffinity(moved.native_id) == {max(given)}
        with pytest.raises(InputError):
            LLM("/nowhere", compile_cache="off", **settings)
        assert os.sched_getaffinity(0) == given
    finally:
        ended.set()
        os.sched_setaffinity(0, given)
