"""Texts under a grammar: they follow it and are the same in every mode, whatever drafts; nothing is
compiled for requests without one."""

from __future__ import annotations

import json
import re

import jsonschema
import pytest

from ssd_jax import LLM, InputError, SamplingParams, StructuredOutputsParams
from ssd_jax.checkpoints.tokenizers.hf import tokenizer_from_directory
from ssd_jax.engine.grammar import allows
from ssd_jax.llm.grammars import Grammars, _Matcher
from ssd_jax.testing import tiny
from tests.checkpoints import tiny_pair
from tests.sampling.edits import Edit, edited

pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z ]*$", "maxLength": 10},
        "count": {"type": "integer", "minimum": -20, "maximum": 999},
        "colour": {"enum": ["red", "green"]},
    },
    "required": ["name", "count", "colour"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
REGEX = r"(ab|ba|[0-9]{2}-){3,9}!"
GRAMMAR = 'start: "(" start ")" | "[" /[a-f]{1,4}/ "]"'
OUTPUTS = [
    {"json": SCHEMA},
    {"regex": REGEX},
    {"choice": ["yes, of course", "no", "never"]},
    {"grammar": GRAMMAR},
    {"json": SCHEMA},
    None,
]
PROMPTS = ["a", "to be or not", "xyxyxyxy", "((((", "The quick brown fox " * 4, "?"]
SAMPLED = [{"temperature": 0.9, "seed": 3}, {"temperature": 1.2, "top_k": 9}, {}]


def open_llm(pair, **settings):
    target, draft = pair
    common = {
        "draft": draft, "mode": "ssd", "draft_placement": "inline", "dtype": "float32", "slots": 4,
        "k": "3", "budget": "8", "context": 300, "verify": "coupled", "compile_cache": "off",
    }  # fmt: skip
    return LLM(target, **common | settings)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return [str(path) for path in tiny_pair.write(tmp_path_factory.mktemp("grammars"), "qwen3")]


@pytest.fixture(scope="module")
def llm(pair):
    with open_llm(pair) as opened:
        yield opened


def asked(**more):
    return [
        SamplingParams(
            structured_outputs=None if outputs is None else StructuredOutputsParams(**outputs),
            max_tokens=12 if outputs is None else 120,
            **SAMPLED[index % 3] | more,
        )
        for index, outputs in enumerate(OUTPUTS)
    ]


def ids(outputs):
    return [output.token_ids for output in outputs]


def assert_valid(outputs):
    for index in (0, 4):
        jsonschema.validate(json.loads(outputs[index].text), SCHEMA)
    assert re.fullmatch(REGEX, outputs[1].text)
    assert outputs[2].text in OUTPUTS[2]["choice"]
    assert re.fullmatch(r"\(*\[[a-f]{1,4}\]\)*", outputs[3].text)
    assert outputs[3].text.count("(") == outputs[3].text.count(")")
    assert {output.finish_reason for output in outputs[:5]} == {"stop"}


def test_programs_for_grammars_are_compiled_when_the_first_request_has_one(llm):
    def masked():
        return {name[0] for name in llm.loaded.programs.names if "masked" in str(name[0])}

    llm.generate("a", SamplingParams(max_tokens=2), mode="ar")
    assert masked() == set()
    llm.generate("a", asked()[2], mode="ar")
    assert masked() == {"masked_accept"}


def test_texts_follow_their_grammars_and_are_the_same_in_every_mode(llm):
    plain = llm.generate(PROMPTS, asked(), mode="ar")
    assert_valid(plain)
    for mode in ("sd", "ssd"):
        assert ids(llm.generate(PROMPTS, asked(), mode=mode)) == ids(plain), mode
    alone = [llm.run([llm.request(PROMPTS[4], asked()[4], 4)], "sd")]
    assert [event.output.token_ids for run in alone for event in run if event.output] == [
        plain[4].token_ids
    ]
    free = llm.generate(PROMPTS[5], asked()[5], mode="ar")[0]
    neighbour = llm.request(PROMPTS[5], asked()[5], 0)
    assert free.token_ids == next(e for e in llm.run([neighbour]) if e.output).output.token_ids


@pytest.mark.more
@pytest.mark.parametrize(
    "settings",
    [
        {"verify": "ratio"},
        {"verify": "block"},
        {"mode": "sd", "draft": "ngram", "draft_placement": None, "budget": None},
        {"mode": "sd", "tree_nodes": 7, "budget": None, "draft_placement": None},
        {"tree_nodes": 5, "budget": "3", "logprobs_of": "processed"},
    ],
    ids=["ratio", "block", "ngram", "trees", "trees of ssd"],
)
def test_greedy_texts_are_plain_decoding_with_every_draft_and_rule(pair, settings):
    with open_llm(pair, **settings) as llm:
        greedy = asked(temperature=0.0)
        plain = llm.generate(PROMPTS, greedy, mode="ar")
        assert_valid(plain)
        for mode in llm.modes:
            assert ids(llm.generate(PROMPTS, greedy, mode=mode)) == ids(plain)
            assert_valid(llm.generate(PROMPTS, asked(temperature=1.0), mode=mode))


def test_log_probabilities_of_the_law_list_only_what_may_follow(pair):
    with open_llm(pair, mode="ar", draft=None, draft_placement=None, k=None, budget=None,
                  logprobs_of="processed") as llm:  # fmt: skip
        outputs = StructuredOutputsParams(choice=["b", "c", "d"])
        params = SamplingParams(structured_outputs=outputs, logprobs=9, temperature=1.0)
        (output,) = llm.generate("a", params)
        first, last = output.logprobs
        assert {llm.tokenizer.token(token) for token, _ in first.top} == {"b", "c", "d"}
        assert sum(2.718281828**value for _, value in first.top) == pytest.approx(1, abs=1e-4)
        assert {token for token, _ in last.top} == llm.tokenizer.eos_ids


def test_stops_and_several_texts_go_with_a_grammar(llm):
    params = SamplingParams(
        structured_outputs={"json": SCHEMA}, stop='"count', n=3, temperature=1.0, max_tokens=90
    )
    (output,) = llm.generate("a", params)
    texts = [text.text for text in output.outputs]
    assert all(re.fullmatch(r'\{"name":"[a-z ]{0,10}",', text) for text in texts)
    assert len({*texts}) > 1
    (short,) = llm.generate("a", SamplingParams(structured_outputs={"json": SCHEMA}, max_tokens=5))
    assert short.finish_reason == "length"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "have nothing; give one of json"),
        ({"regex": "a", "json_object": True}, "have regex, json_object; give one"),
        ({"regex": 3}, r"structured_outputs.regex = 3 is not understood; give text"),
        ({"json": "[1]"}, "structured_outputs.json = '.1.' is no JSON schema"),
        ({"json": {"type": {1}}}, "is no JSON schema"),
        ({"choice": ["a", ""]}, "structured_outputs.choice"),
        ({"regex": "a" * 200_000}, "200000 characters; at most 131072"),
        ({"whitespace_pattern": "x"}, "x-guidance"),
        ({"jsn": "{}"}, "did you mean 'json'"),
        ("{", "structured_outputs = '{' is no JSON"),
        (3, "structured_outputs = 3 is not understood"),
    ],
    ids=range(11),
)
def test_what_is_no_grammar_is_refused_before_a_model_is_asked(fields, message):
    with pytest.raises(InputError, match=message):
        SamplingParams(structured_outputs=fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"regex": "(a"},
        {"regex": "a(?=b)"},
        {"json": {"type": "strin"}},
        {"json": {"$ref": "http://example.org/schema"}},
        {"json": {"allOf": [{"type": "string"}, {"type": "integer"}]}},
        {"grammar": "start: start"},
        {"grammar": "start: nowhere"},
        {"grammar": "(" * 50_000},
        {"grammar": "root ::= " + "(" * 50_000},
        {"regex": "(" * 50_000},
    ],
    ids=range(10),
)
def test_grammars_that_cannot_be_followed_are_refused_by_their_field(llm, fields):
    (name,) = fields
    with pytest.raises(InputError, match=f"structured_outputs.{name} = .* is no grammar that"):
        llm.request("a", SamplingParams(structured_outputs=fields))


def test_a_text_that_does_not_end_with_its_grammar_is_refused():
    with pytest.raises(InputError, match="ignore_eos and structured_outputs exclude"):
        SamplingParams(structured_outputs={"regex": "a"}, ignore_eos=True)


def test_llguidance_is_asked_for_by_name_where_it_is_missing(llm, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(InputError, match=r"pip install 'ssd-jax\[structured\]'"):
        Grammars(llm.tokenizer).compile(StructuredOutputsParams(regex="a"))


def test_vocabularies_of_whole_words_have_masks_too(tmp_path):
    tiny.write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(tiny.config("llama")))
    tokenizer = tokenizer_from_directory(tmp_path)
    tokenizer._backend.add_tokens([f"<more {n}>" for n in range(288 - tokenizer.size)])
    tokenizer.size = 288
    mask = Grammars(tokenizer).compile(StructuredOutputsParams(choice=["a", "b"])).start().mask()
    assert mask.shape == (9,)
    allowed = [tokenizer.token(token) for token in range(288) if allows(mask, token)]
    assert sorted(allowed) == ["a", "b"]


def look_at_ends(llm):
    """Whether each end is possible behind nothing, a, ab and abc."""
    tokenizer = llm.tokenizer
    matcher = Grammars(tokenizer).compile(StructuredOutputsParams(regex="ab?c?")).start()
    found = []
    for letter in "abc":
        found.append({allows(matcher.mask(), end) for end in tokenizer.eos_ids})
        (token,) = tokenizer.encode(letter, add_special_tokens=False)
        matcher.consume(token)
    mask = matcher.mask()
    assert found == [{False}, {True}, {True}]
    assert {token for token in range(tokenizer.size) if allows(mask, token)} == tokenizer.eos_ids


def test_a_text_may_end_exactly_where_its_grammar_may(llm):
    look_at_ends(llm)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("mask | self._ends if matcher.is_accepting() else mask", "mask | self._ends"),
        ("mask | self._ends if matcher.is_accepting() else mask", "mask"),
    ],
    ids=["early", "never"],
)
def test_ends_that_come_early_or_never_are_caught(llm, old, new):
    with edited([Edit(_Matcher, "mask", old, new)]), pytest.raises(AssertionError):
        look_at_ends(llm)


def test_a_grammar_is_compiled_once(llm):
    params = SamplingParams(structured_outputs={"regex": "a+b"})
    first = llm.request("a", params)
    again = llm.request("b", SamplingParams(structured_outputs={"regex": "a+b"}))
    assert first.grammar is again.grammar
