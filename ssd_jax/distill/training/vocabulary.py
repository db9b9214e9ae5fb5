"""The ids that a draft with a reduced output vocabulary can propose."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import numpy as np

from ssd_jax.distill.training.packing import Text
from ssd_jax.errors import InputError


def most_frequent(
    texts: Iterable[Text], *, count: int, size: int, always: Collection[int]
) -> np.ndarray:
    """The ids that completions have most often.

    Args:
      texts: whose completions are counted; plain text counts whole.
      count: ids to choose.
      size: ids that the tokenizer has; later ones are padding.
      always: ids that are chosen however rare, such as those that end a text.

    Returns: [count] int32, ascending. Of equally frequent ids the lowest are chosen.

    Raises:
      InputError: see `check_output_size`.
    """
    check_output_size(count, size=size, always=always)
    seen = np.zeros(size, np.int64)
    for text in texts:
        seen += np.bincount(text.tokens[text.prompt_length :], minlength=size)[:size]
    seen[list(always)] = np.iinfo(np.int64).max
    chosen = np.argsort(-seen, kind="stable")[:count]
    return np.sort(chosen).astype(np.int32)


def check_output_size(count: int, *, size: int, always: Collection[int]) -> None:
    """Refuses a number of ids that cannot be chosen; see `most_frequent`.

    Raises:
      InputError: more ids than there are, or fewer than must be chosen.
    """
    if count > size:
        raise InputError(f"output_size = {count} is more than the {size} ids of the tokenizer")
    if count < len(set(always)):
        raise InputError(
            f"output_size = {count} has no room for the {len(set(always))} special ids, which are "
            "always in it; raise it"
        )


def columns_of(ids: np.ndarray, size: int) -> np.ndarray:
    """[size] int32: the place of each id in `ids`; `len(ids)` for one that is not in it."""
    columns = np.full(size, len(ids), np.int32)
    columns[ids] = np.arange(len(ids), dtype=np.int32)
    return columns
