"""Checkpoints that several modules open."""

from __future__ import annotations

import pytest

from tests.checkpoints import tiny_pair
from tests.llm.paged import SHAPE


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Target and draft, for models whose slots share pages."""
    return tiny_pair.write(tmp_path_factory.mktemp("paged"), "qwen3", **SHAPE)
