"""Drafts whose programs several files test, compiled once."""

import pytest

from ssd_jax.testing import tiny
from tests.devices.branches.rounds import Seen
from tests.devices.branches.script import Draft, compiled, scripted
from tests.models.every_mechanism import in_windows
from tests.models.golden import ON_GPUS, ON_TPUS
from tests.selection import cases


@pytest.fixture(scope="session")
def unrolled_draft(tmp_path_factory) -> Draft:
    """Qwen3 with layers one by one."""
    path = tiny.write_checkpoint(tmp_path_factory.mktemp("branches") / "qwen3", "qwen3")
    return compiled(path, c=1.0)


@pytest.fixture(scope="session")
def scanned_draft(tmp_path_factory) -> Draft:
    """Llama with its layers scanned, Saguaro sampling, and programs of two budgets."""
    path = tiny.write_checkpoint(tmp_path_factory.mktemp("branches") / "llama", "llama")
    return compiled(path, there=ON_TPUS, c=0.5, fewer=(5,))


@pytest.fixture(scope="session")
def joined_draft(tmp_path_factory) -> Draft:
    """Qwen2 with its layers in few arrays."""
    path = tiny.write_checkpoint(tmp_path_factory.mktemp("branches") / "qwen2", "qwen2")
    return compiled(path, there=ON_GPUS, c=1.0)


@pytest.fixture(scope="session")
def windowed_draft(tmp_path_factory) -> Draft:
    """Every mechanism, with windows shorter than branches."""
    path = tmp_path_factory.mktemp("branches") / "windows"
    return compiled(tiny.write_checkpoint(path, "granite", **in_windows(3)), c=1.0)


SCRIPTS = ["unrolled", "unrolled, longer", "scanned", "scanned, two budgets", "joined", "windowed"]


@pytest.fixture(scope="session", params=cases(SCRIPTS, "unrolled", "joined"))
def script(request) -> tuple[Draft, list[Seen], bool]:
    """All rounds of the script, and whether each had one forward more."""
    name, _, how = request.param.partition(", ")
    draft, longer = request.getfixturevalue(f"{name}_draft"), how == "longer"
    rounds = draft.of_two_budgets() if how == "two budgets" else draft.rounds(longer=longer)
    return draft, scripted(rounds), longer
