"""One distillation at a time works in a directory."""

import pytest

from ssd_jax.distill.lock import only_one
from ssd_jax.errors import InputError


def test_a_directory_is_free_again_after_its_user(tmp_path):
    with (
        only_one(tmp_path),
        pytest.raises(InputError, match="another ssd-jax distill"),
        only_one(tmp_path),
    ):
        pass
    with only_one(tmp_path):
        pass
