"""A small clean file of every kind that this package reads."""

from __future__ import annotations

import gzip
import json
import zipfile
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from ssd_jax.checkpoints.opening import open_checkpoint
from ssd_jax.checkpoints.orbax import write_checkpoint
from ssd_jax.engine.rounds.trace import RowTrace, Trace
from ssd_jax.roles.activity import Busy
from ssd_jax.testing import tiny
from ssd_jax.tools.distill.manifest import Manifest, write_manifest
from ssd_jax.tools.distill.prompt_ids import PromptIds, write_prompts
from ssd_jax.tools.distill.shards import Sample, encode_scores, encode_texts
from tests.checkpoints import tiny_drafts
from tests.fuzz import gguf_bytes

TOML = """# a configuration
target = "a/b.gguf"
mode = "sd"
draft = "ngram"
k = 4
slots = 2
context = 128
temperature = 0.5
stop = ["a", "b"]
stop_token_ids = [1, 2]
"""
DISTILL = """[target]
source = "t"
[prompts]
directory = "."
train = [{path = "a.jsonl", ids = "0-3", limit = 2, times = 2}, {path = "b.txt", tasks = 3}]
held_out = [{path = "gsm8k"}]
[magpie]
completions = 4
[generate]
max_tokens = 32
"""
LINES = [
    {"prompt": "a"},
    {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]},
    {"task_id": "x/1", "prompt": "def f():"},
    {"question_id": 2, "turns": ["a", "b"]},
    {"instruction": "do", "instances": [{"input": "x"}]},
    {"prompt_index": 0, "token_ids": [1, 2], "finish_reason": "stop"},
]
TEMPLATE = """{%- set ns = namespace(found=false) -%}
{%- if messages[0]['role'] == 'system' %}{% set first = messages[0]['content'] %}{% endif %}
{%- for m in messages %}{{ bos_token }}<|{{ m.role }}|>{{ m['content'] | trim }}
{%- if loop.last and add_generation_prompt %}<|assistant|>{% endif %}{% endfor %}"""


def build(directory: Path) -> None:
    """Writes `directory/KIND`, a file or a directory, for each of KINDS."""
    for kind, write in _WRITERS.items():
        (directory / kind).mkdir(parents=True)
        write(directory / kind)


def _hf(directory: Path) -> None:
    tiny.write_checkpoint(directory)
    _shard(directory)
    config = {
        "eos_token": "<eos>",
        "pad_token": {"content": "<pad>"},
        "add_bos_token": False,
        "added_tokens_decoder": {"256": {"content": "<eos>", "special": True}},
        "additional_special_tokens": ["<eot>"],
        "chat_template": [{"name": "default", "template": tiny.TEMPLATE}],
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<eos>"}))


def _shard(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    weight_map = {}
    for part in range(2):
        file = f"model-{part}.safetensors"
        names = sorted(tensors)[part::2]
        save_file({name: tensors[name] for name in names}, directory / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def _scaled(directory: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    tiny.write_checkpoint(directory, "qwen3", rope_scaling=scaling)


def _orbax(directory: Path) -> None:
    plain = tiny.write_checkpoint(directory / "plain", num_hidden_layers=1)
    write_checkpoint(directory / "made", open_checkpoint(str(plain)), "float32")


def _draft(directory: Path) -> None:
    target = tiny_drafts.open_target(tiny.write_checkpoint(directory / "target"))
    ids = np.array([3, 5, tiny.EOS, tiny.END_OF_TURN, tiny.PAD])
    tiny_drafts.write(directory / "draft", target, ids)


def _gguf(family: str) -> Callable[[Path], object]:
    return lambda directory: (directory / "m.gguf").write_bytes(gguf_bytes.clean(family).pack())


def _wheel(directory: Path) -> None:
    content = b"GGUF" + bytes(range(256)) * 200
    with zipfile.ZipFile(directory / "w.whl", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("w/m.gguf", content)
        archive.writestr("w/other.txt", "text")
    (directory / "cached").mkdir()
    (directory / "cached" / "m.gguf").write_bytes(content)
    marker = {"file": "m.gguf", "sha256": sha256(content).hexdigest(), "stamp": [0, 0]}
    (directory / "cached" / "source.json").write_text(json.dumps(marker))


def _lines(directory: Path) -> None:
    text = "".join(json.dumps(line) + "\n" for line in LINES)
    (directory / "p.jsonl").write_text(text)
    (directory / "z.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    (directory / "talk.jsonl").write_text(json.dumps(LINES[1]) + "\n")
    (directory / "run.jsonl").write_text(json.dumps(LINES[5]) + "\n")


def _toml(directory: Path) -> None:
    (directory / "engine.toml").write_text(TOML)
    (directory / "distill.toml").write_text(DISTILL)


def _trace(directory: Path) -> None:
    trace = Trace(directory / "trace.json", zero=0.0)
    engine = trace.engine("ssd k=2")
    engine.prefill((0.0, 1.0), 3, 17)
    for number in range(4):
        engine.round((1.0 + number, 1.9 + number), [RowTrace(0, 3, "hit", 2, 1, [7, 8])])
        engine.draft([Busy("expand", 1.5 + number, 1.8 + number, [0])])
    trace.write()


def _template(directory: Path) -> None:
    tiny.write_tokenizer(directory, template=TEMPLATE)


def _text(directory: Path) -> None:
    (directory / "text.txt").write_text("Some text\r\nof two lines, é.\n")


def _distill(directory: Path) -> None:
    samples = [Sample(tokens=np.arange(5, dtype=np.int32), prompt_length=2)] * 2
    rows = sum(len(sample.learnt) for sample in samples)
    texts = encode_texts(samples, 300)
    scores = encode_scores(np.zeros((rows, 2), int), np.zeros((rows, 2)), 300)

    def entry(name: str, data: bytes) -> dict:
        (directory / name).write_bytes(data)
        return {"file": name, "bytes": len(data), "sha256": sha256(data).hexdigest()}

    shards = [entry("t.safetensors", texts) | {"scores": entry("s.safetensors", scores)}]
    prompt = PromptIds(set="a", index=0, ids=[1, 2])
    digests = write_prompts(directory, {"train": [prompt]})
    write_manifest(
        directory,
        Manifest(
            stage="generate",
            settings={"generate.max_tokens": 3},
            inputs={"target": "t", "train": digests["train"]},
            finished=True,
            data={"shards": shards},
        ),
    )


_WRITERS: dict[str, Callable[[Path], object]] = {
    "hf": _hf,
    "scaled": _scaled,
    "gguf-llama": _gguf("llama"),
    "gguf-qwen2": _gguf("qwen2"),
    "orbax": _orbax,
    "draft": _draft,
    "wheel": _wheel,
    "lines": _lines,
    "toml": _toml,
    "trace": _trace,
    "template": _template,
    "text": _text,
    "distill": _distill,
}
KINDS = tuple(_WRITERS)
