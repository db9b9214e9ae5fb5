"""Weights in the quantised types that a file stores them in, for `dtype = native`: packed for the
products of a processor, or in groups for those of XLA."""

from __future__ import annotations

import re
from collections import Counter

from ssd_jax.checkpoints.weights.tensors import TensorSource
from ssd_jax.errors import InputError
from ssd_jax.kernels.linear.group_form import FLOAT4, GroupForm
from ssd_jax.kernels.linear.kinds import BFLOAT16, STORED_KINDS

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_KINDS = (*STORED_KINDS, BFLOAT16.name)
_FLOATS = (None, BFLOAT16.name, "BF16", "F16", "F32")
"""Types of matrices that are not quantised."""
_KIND_NAMES = ", ".join(STORED_KINDS)
_ROUTES = re.compile(r"\.mlp\.(router|shared_expert_gate)\.weight")
_REMEDY = "give `dtype='bfloat16'` or `dtype='int8'` (`draft_dtype` of a draft)"


def check_source(source: str | None, dtype: str | None) -> None:
    """Refuses, before any download, a source whose types are known after it alone.

    Args:
      source: see `sources.resolve`.

    Raises:
      InputError: dtype is `native` and the source is on the hub.
    """
    if dtype == "native" and source is not None and source.startswith("hf:"):
        raise InputError(
            f"{source}: dtype = 'native' needs quantised weights, and whether these are is known "
            "once they are downloaded; leave it out: `auto` takes it where it can"
        )


def native_kinds(tensors: TensorSource, *, where: str) -> dict[str, str]:
    """The kind (`kernels.linear.kinds`) of each matrix that is packed as stored; reads no data.

    Args:
      where: names the checkpoint in errors.

    Raises:
      InputError: nothing is quantised, or a matrix of a product has a type that no kernel takes;
        those in bfloat16 beside quantised ones are packed, too.
    """
    kinds = {name: _kind(tensors, name) for name in _product_weights(tensors)}
    if None in kinds.values() or {*kinds.values()} == {BFLOAT16.name}:
        raise _not_quantised(where)
    unsupported = [name for name, kind in kinds.items() if kind not in _KINDS]
    if unsupported:
        counts = ", ".join(f"{count} {kind}" for kind, count in Counter(kinds.values()).items())
        raise InputError(
            f"{where}: dtype = 'native' has no products with {kinds[unsupported[0]]}, the type of "
            f"tensor {unsupported[0]!r}; the file's matrices are {counts}, and the types with "
            f"products are {_KIND_NAMES}; {_REMEDY}"
        )
    embedding_kind = tensors.stored_type(_EMBEDDING)
    if embedding_kind in STORED_KINDS:
        kinds[_EMBEDDING] = embedding_kind
    return {name: str(kind) for name, kind in kinds.items()}


def has_native(tensors: TensorSource) -> bool:
    """Whether `native_kinds` knows every matrix that takes part in a product."""
    kinds = {_kind(tensors, name) for name in _product_weights(tensors)}
    return kinds <= {*_KINDS} and kinds != {BFLOAT16.name}


def _kind(tensors: TensorSource, name: str) -> str | None:
    """The kind of a matrix, or a type without one; None if its file is not quantised."""
    stored = tensors.stored_type(name)
    return BFLOAT16.name if stored == "BF16" else stored


def _of_experts(name: str) -> bool:
    return ".mlp.experts." in name


def native_groups(tensors: TensorSource, *, where: str) -> dict[str, GroupForm]:
    """The form of each matrix that stays in groups; reads no data. Those that are not quantised
    become bfloat16.

    Args:
      where: names the checkpoint in errors.

    Raises:
      InputError: nothing is quantised, or a matrix of a product in another way than in groups of
        inputs that follow each other.
    """
    forms = {
        name: form
        for name, shape in tensors.shapes.items()
        if len(shape) > 1 and (form := _form(tensors, name)) is not None
    }
    others = _without_form(tensors)
    if others:
        raise InputError(
            f"{where}: dtype = 'native' takes integers and 8-bit floats with scales of groups of "
            f"inputs that follow each other, and tensor {others[0]!r} is "
            f"{tensors.stored_type(others[0])} without these; {_REMEDY}"
        )
    if not forms:
        raise _not_quantised(where)
    return forms


def has_groups(tensors: TensorSource) -> bool:
    """Whether `native_groups` has forms."""
    forms = (_form(tensors, name) for name in _product_weights(tensors))
    return any(form is not None for form in forms) and not _without_form(tensors)


def _form(tensors: TensorSource, name: str) -> GroupForm | None:
    """The form of a matrix that has products in groups: floats of four bits are for experts, and
    what chooses among these stays float32."""
    form = None if _ROUTES.search(name) else tensors.group_form(name)
    return None if form and form.dtype == FLOAT4 and not _of_experts(name) else form


def _without_form(tensors: TensorSource) -> list[str]:
    """Matrices that are quantised otherwise than in groups."""
    return [
        name
        for name, shape in tensors.shapes.items()
        if len(shape) > 1
        and not _ROUTES.search(name)
        and tensors.stored_type(name) not in _FLOATS
        and _form(tensors, name) is None
    ]


def _not_quantised(where: str) -> InputError:
    return InputError(
        f"{where} is not quantised, and dtype = 'native' takes weights as they are quantised in "
        f"their file ({_KIND_NAMES}); {_REMEDY}"
    )


def _product_weights(tensors: TensorSource) -> list[str]:
    """Matrices, also those of experts, except what chooses among these, which stays float32."""
    names = [
        name
        for name, shape in tensors.shapes.items()
        if len(shape) > 1 and name.endswith(".weight") and not _ROUTES.search(name)
    ]
    untied_embedding = _EMBEDDING if _HEAD in names else None
    return [name for name in names if name != untied_embedding]
