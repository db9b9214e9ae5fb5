"""Drafts whose programs several files test, compiled once."""

import pytest

from tests import tiny
from tests.runtime.branch_rounds import Seen
from tests.runtime.branch_script import Draft, compiled, scripted


@pytest.fixture(scope="session")
def unrolled_draft(tmp_path_factory) -> Draft:
    """Qwen3 with layers one by one."""
    path = tiny.write_checkpoint(tmp_path_factory.mktemp("branches") / "qwen3", "qwen3")
    return compiled(path, scan=False, c=1.0)


@pytest.fixture(scope="session")
def scanned_draft(tmp_path_factory) -> Draft:
    """Llama with its layers scanned, and Saguaro sampling."""
    path = tiny.write_checkpoint(tmp_path_factory.mktemp("branches") / "llama", "llama")
    return compiled(path, scan=True, c=0.5)


@pytest.fixture(scope="session", params=["unrolled", "unrolled, longer", "scanned"])
def script(request) -> tuple[Draft, list[Seen], bool]:
    """All rounds of the script, and whether each had one forward more."""
    name, _, longer = request.param.partition(", ")
    draft = request.getfixturevalue(f"{name}_draft")
    return draft, scripted(draft.rounds(longer=bool(longer))), bool(longer)
