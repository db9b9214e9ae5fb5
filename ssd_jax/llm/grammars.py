"""Compiles the grammars of requests, by llguidance, for the tokenizer of a model."""

from __future__ import annotations

import collections
import functools
import importlib
import json
import threading
from types import ModuleType
from typing import Any

import numpy as np
from jaxtyping import Int32
from typing_extensions import override

from ssd_jax.checkpoints.tokenizers.tokenizer import Tokenizer
from ssd_jax.engine.grammar import Grammar, Matcher
from ssd_jax.errors import InputError
from ssd_jax.sampling.masks import BITS, words_of
from ssd_jax.sampling.structured_outputs import StructuredOutputsParams
from ssd_jax.system.files import brief, shown

_MOST_COMPILED = 64  # grammars that are kept, those used last
_MOST_WORDS = 300  # characters of what llguidance says of an error


class Grammars:
    """The grammars of a model's requests; any thread may compile one.

    Each is compiled once while it is among the last ones used.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._compiled: collections.OrderedDict[StructuredOutputsParams, Grammar]
        self._compiled = collections.OrderedDict()

    def compile(self, outputs: StructuredOutputsParams) -> Grammar:
        """A grammar to begin texts with.

        Raises:
          InputError: llguidance is not installed, the model names no token that ends a text, or the
            grammar is wrong, too complex, or without any text.
        """
        with self._lock:
            grammar = self._compiled.pop(outputs, None)
            if grammar is not None:
                self._compiled[outputs] = grammar
                return grammar
        grammar = _Compiled(self._llguidance, self._vocabulary, self._tokenizer, outputs)
        with self._lock:
            self._compiled[outputs] = grammar
            while len(self._compiled) > _MOST_COMPILED:
                self._compiled.popitem(last=False)
        return grammar

    @functools.cached_property
    def _llguidance(self) -> Any:
        return _import()

    @functools.cached_property
    def _vocabulary(self) -> Any:
        tokenizer = self._tokenizer
        if not tokenizer.eos_ids:
            raise InputError(
                "structured_outputs need a model that names an EOS token, which ends the text"
            )
        try:
            return self._llguidance.LLTokenizer(
                tokenizer.definition, n_vocab=tokenizer.size, eos_token=sorted(tokenizer.eos_ids)
            )
        except Exception as error:  # its errors have no type of their own
            raise InputError(
                f"structured_outputs: llguidance cannot read this model's tokenizer: {brief(error)}"
            ) from None


def _import() -> ModuleType:
    try:
        return importlib.import_module("llguidance")
    except ImportError:
        raise InputError(
            "structured_outputs need llguidance; install it, for instance by "
            "`pip install 'ssd-jax[structured]'`"
        ) from None


class _Compiled(Grammar):
    """A grammar of llguidance's, whose texts begin with copies of one matcher."""

    def __init__(
        self,
        llguidance: Any,
        vocabulary: Any,
        tokenizer: Tokenizer,
        outputs: StructuredOutputsParams,
    ) -> None:
        ends = np.zeros(words_of(tokenizer.size) * BITS, bool)
        ends[[*tokenizer.eos_ids]] = True
        self._ends = _packed(ends)
        try:
            source = _source(llguidance, outputs)
        except Exception as error:  # also its parser's own
            raise _wrong(outputs, str(error) or repr(error)) from None
        limits = llguidance.LLParserLimits(verbose_errors=False)
        self._matcher = llguidance.LLMatcher(vocabulary, source, log_level=0, limits=limits)
        if self._matcher.is_error():
            raise _wrong(outputs, self._matcher.get_error())
        try:
            possible = self.start().mask().any()
        except InputError as error:
            raise _wrong(outputs, str(error)) from None
        if not possible:
            raise _wrong(outputs, "no text matches it")

    @override
    def start(self) -> Matcher:
        return _Matcher(self._matcher.deep_copy(), self._ends)


class _Matcher(Matcher):
    def __init__(self, matcher: Any, ends: Int32[np.ndarray, "mask"]) -> None:
        self._matcher, self._ends = matcher, ends

    @override
    def mask(self) -> Int32[np.ndarray, "mask"]:
        matcher = self._matcher
        mask = np.frombuffer(matcher.compute_bitmask(), np.int32)
        if matcher.is_error():
            raise _failed(matcher)
        mask = mask[: self._ends.size] & ~self._ends  # it has a word more where words are full
        return mask | self._ends if matcher.is_accepting() else mask

    @override
    def consume(self, token: int) -> None:
        if not self._matcher.consume_token(token):
            raise _failed(self._matcher)

    @override
    def rollback(self, count: int) -> None:
        if not self._matcher.rollback(count):
            raise _failed(self._matcher)


def _source(llguidance: Any, outputs: StructuredOutputsParams) -> str:
    """A grammar as llguidance takes it."""
    if outputs.json_object:
        return llguidance.grammar_from("json_schema", '{"type": "object"}')
    if outputs.json is not None:
        return llguidance.grammar_from("json_schema", outputs.json)
    if outputs.regex is not None:
        return llguidance.grammar_from("regex", outputs.regex)
    if outputs.choice:
        return llguidance.grammar_from("choice", json.dumps(outputs.choice))
    return llguidance.grammar_from("grammar", outputs.grammar)


def _packed(bits: np.ndarray) -> Int32[np.ndarray, "mask"]:
    return np.packbits(bits, bitorder="little").view(np.int32)


def _wrong(outputs: StructuredOutputsParams, why: str) -> InputError:
    value = getattr(outputs, outputs.kind)
    return InputError(
        f"structured_outputs.{outputs.kind} = {shown(value)} is no grammar that can be followed: "
        f"{_one_line(why)}"
    )


def _failed(matcher: Any) -> InputError:
    return InputError(
        f"the text's grammar has grown too complex: {_one_line(matcher.get_error())}; give a "
        "simpler one"
    )


def _one_line(text: str) -> str:
    words = " ".join(text.split())
    return words if len(words) <= _MOST_WORDS else words[:_MOST_WORDS] + "..."
