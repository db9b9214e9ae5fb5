"""Each kind of file read as the product does, and what was read used a little."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

from absl import flags

from ssd_jax.checkpoints import pip_source
from ssd_jax.checkpoints.drafts.source import DraftTensors
from ssd_jax.checkpoints.pip_source import Pin
from ssd_jax.checkpoints.tokenizers.hf import tokenizer_from_directory
from ssd_jax.checkpoints.tokenizers.tokenizer import Tokenizer
from ssd_jax.cli import settings as command_settings
from ssd_jax.cli.settings import config_of, new_flags, params_of
from ssd_jax.devices.opening.models import OpenedModel, open_model
from ssd_jax.errors import InputError
from ssd_jax.kernels.linear.kinds import KINDS
from ssd_jax.kernels.linear.packing import pack_blocks
from ssd_jax.llm.prompt_files import prompt_line, read_json_lines
from ssd_jax.system.files import MAX_TEXT, read_text
from ssd_jax.tools.bench.prompts import parse_line
from ssd_jax.tools.chat.conversation import load
from ssd_jax.tools.chat.terminal import HistoryFile
from ssd_jax.tools.compare.pairs import read_outputs
from ssd_jax.tools.distill.manifest import read_manifest
from ssd_jax.tools.distill.prompt_ids import read_prompts
from ssd_jax.tools.distill.prompt_settings import PromptEntry
from ssd_jax.tools.distill.reading import read_lines, read_plain
from ssd_jax.tools.distill.settings import read_settings
from ssd_jax.tools.distill.shards import read_shards
from ssd_jax.tools.traces.read import read_trace

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]


def every(*reads: Callable[[], object]) -> None:
    """Calls all; what some refuse is refused at the end."""
    refused = None
    for read in reads:
        try:
            read()
        except InputError as error:
            refused = error
    if refused is not None:
        raise refused


def _use(opened: OpenedModel) -> None:
    tensors = opened.checkpoint.tensors
    for name in opened.model.checkpoint_structs():
        tensors.read(name, (slice(0, 3),))
        kind = KINDS.get(tensors.stored_type(name) or "")
        if kind is not None:  # as dtype = native has it
            if len(tensors.shape(name)) > 2:
                blocks = tensors.read_expert_blocks(name, 0, slice(0, tensors.shape(name)[1]))
            else:
                blocks = tensors.read_blocks(name)
            pack_blocks(kind, blocks)
    assert len(opened.fingerprint) == 64
    _speak(opened.tokenizer)


def _speak(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hello world, é 123")
    tokenizer.decode(ids, skip_special_tokens=False)
    if tokenizer.has_chat_template:
        tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True)


def _model(path: Path) -> None:
    _use(open_model(str(path), "float32"))


def _draft(path: Path) -> None:
    target = open_model(str(path / "target"), "float32")
    opened = open_model(str(path / "draft"), "float32", target=target.checkpoint)
    assert isinstance(opened.checkpoint.tensors, DraftTensors)
    _use(opened)


def _wheel(path: Path) -> None:
    (path / "new").mkdir()
    pin = Pin(package="w", version="1", wheel_sha256="0" * 64)
    pip_source._cached(path / "cached", pin)
    pip_source._extract(path / "w.whl", path / "new", pin)


def _lines(path: Path) -> None:
    every(
        lambda: read_json_lines(path / "p.jsonl", prompt_line),
        lambda: read_json_lines(path / "p.jsonl", parse_line),
        lambda: read_lines(PromptEntry(path="p.jsonl"), path / "p.jsonl"),
        lambda: read_json_lines(path / "z.jsonl.gz", prompt_line),
        lambda: load(path / "talk.jsonl"),
        lambda: read_outputs(path / "run.jsonl"),
        lambda: HistoryFile(path / "run.jsonl").load_history_strings(),
    )


def _toml(path: Path) -> None:
    def engine() -> None:
        arguments = [f"--config={path / 'engine.toml'}"]
        try:
            given = command_settings.parse(new_flags(), "generate", arguments)
        except flags.Error as error:  # which the command line takes for bad input, too
            raise InputError(str(error)) from None
        config_of(given)
        params_of(given)

    every(engine, lambda: read_settings(path / "distill.toml"))


def _trace(path: Path) -> None:
    for lanes in read_trace(path / "trace.json"):
        lanes.hidden_share()
        for round_ in lanes.rounds:
            repr((round_.committed, round_.sources))


def _template(path: Path) -> None:
    _speak(tokenizer_from_directory(path))


def _text(path: Path) -> None:
    every(
        lambda: read_text(path / "text.txt", max_bytes=MAX_TEXT),
        lambda: read_plain(path / "text.txt"),
    )


def _distill(path: Path) -> None:
    prompts = path / "train.safetensors"
    small = prompts.is_file() and prompts.stat().st_size < 1 << 20
    digest = sha256(prompts.read_bytes()).hexdigest() if small else ""

    def shards() -> None:
        assert len(list(read_shards(path, target="t"))) < 1000

    every(lambda: read_manifest(path), shards, lambda: read_prompts(path, "train", digest))


READERS: dict[str, Callable[[Path], None]] = {
    "hf": _model,
    "scaled": _model,
    "gguf-llama": lambda path: _model(path / "m.gguf"),
    "gguf-qwen2": lambda path: _model(path / "m.gguf"),
    "orbax": lambda path: _model(path / "made"),
    "draft": _draft,
    "wheel": _wheel,
    "lines": _lines,
    "toml": _toml,
    "trace": _trace,
    "template": _template,
    "text": _text,
    "distill": _distill,
}
