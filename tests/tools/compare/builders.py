"""Outputs and pairs in one line."""

from ssd_jax.tools.compare.pairs import Output, Pair


def generation(*ids, index=0, reason="length"):
    return Output(prompt_index=index, token_ids=ids, finish_reason=reason)


def refused(index=0):
    return Output(prompt_index=index, error="too long")


def pair(a, b, index=0):
    return Pair(prompt_index=index, a=a, b=b)
