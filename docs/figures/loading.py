"""`python docs/figures/loading.py LAYERS DIRECTORY [DTYPE]`: how long a checkpoint takes to load.

Writes so many layers of gpt-oss-20b to DIRECTORY, with weights that mean nothing, a file for each
layer and MXFP4 experts as they are published, unless they are there; then prints the seconds and
the peak memory of reading the files, and of loading them as DTYPE (native), each in a process of
its own, from the disk (`cold`) and from the system's cache of files.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import ml_dtypes
import numpy as np

from ssd_jax.devices.opening.models import open_model
from ssd_jax.testing.tiny import write_tokenizer

HIDDEN, EXPERTS, VOCABULARY, HEADS, KV_HEADS, HEAD = 2880, 32, 32000, 64, 8, 64
CONFIG = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "eos_token_id": 2,
    "head_dim": HEAD,
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": HIDDEN,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": HEADS,
    "num_experts_per_tok": 4,
    "num_key_value_heads": KV_HEADS,
    "num_local_experts": EXPERTS,
    "quantization_config": {"quant_method": "mxfp4"},
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000,
    "sliding_window": 128,
    "tie_word_embeddings": False,
    "vocab_size": VOCABULARY,
}


def shapes(layer: int) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """The tensors of a layer, with their shapes and types."""
    name = f"model.layers.{layer}"
    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield f"{name}.{norm}.weight", (HIDDEN,), "BF16"
    for part, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
        yield f"{name}.self_attn.{part}_proj.weight", (heads * HEAD, HIDDEN), "BF16"
        yield f"{name}.self_attn.{part}_proj.bias", (heads * HEAD,), "BF16"
    yield f"{name}.self_attn.o_proj.weight", (HIDDEN, HEADS * HEAD), "BF16"
    yield f"{name}.self_attn.o_proj.bias", (HIDDEN,), "BF16"
    yield f"{name}.self_attn.sinks", (HEADS,), "BF16"
    yield f"{name}.mlp.router.weight", (EXPERTS, HIDDEN), "BF16"
    yield f"{name}.mlp.router.bias", (EXPERTS,), "BF16"
    for part, rows in (("gate_up", 2 * HIDDEN), ("down", HIDDEN)):
        yield f"{name}.mlp.experts.{part}_proj_blocks", (EXPERTS, rows, HIDDEN // 32, 16), "U8"
        yield f"{name}.mlp.experts.{part}_proj_scales", (EXPERTS, rows, HIDDEN // 32), "U8"
        yield f"{name}.mlp.experts.{part}_proj_bias", (EXPERTS, rows), "BF16"


def write(layers: int, directory: Path) -> None:
    """See the module."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": layers}))
    write_tokenizer(directory)
    ends = [(name, (VOCABULARY, HIDDEN), "BF16") for name in ("model.embed_tokens.weight",)]
    ends += [("model.norm.weight", (HIDDEN,), "BF16"), ("lm_head.weight", *ends[0][1:])]
    files = {f"layer-{layer}.safetensors": [*shapes(layer)] for layer in range(layers)}
    files["ends.safetensors"] = ends
    index = {name: file for file, tensors in files.items() for name, *_ in tensors}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    rng = np.random.default_rng(0)
    for file, tensors in files.items():
        widths = [int(np.prod(shape)) * (2 if kind == "BF16" else 1) for _, shape, kind in tensors]
        offsets = np.cumsum([0, *widths]).tolist()
        entries = {
            name: {"dtype": kind, "shape": shape, "data_offsets": offsets[i : i + 2]}
            for i, (name, shape, kind) in enumerate(tensors)
        }
        header = json.dumps(entries).encode()
        header += b" " * (-len(header) % 8)
        with (directory / file).open("wb") as out:
            out.write(len(header).to_bytes(8, "little") + header)
            for name, shape, kind in tensors:
                if kind == "BF16":
                    values = rng.standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16)
                elif name.endswith("_scales"):
                    values = rng.integers(118, 122, shape, np.uint8)
                else:
                    values = rng.integers(0, 256, shape, np.uint8)
                out.write(values.view(np.uint8).data)


def read_files(directory: Path, dtype: str) -> object:
    """Reads every byte into memory."""
    return [np.fromfile(file, np.uint8) for file in sorted(directory.glob("*.safetensors"))]


def load(directory: Path, dtype: str) -> object:
    """Loads the weights as `ssd-jax` does."""
    opened = open_model(str(directory), dtype)
    return jax.block_until_ready(opened.load())


def measure(what: str, directory: Path, dtype: str) -> None:
    """Prints seconds, those of processors, and the peak of anonymous memory in GB, of one of these
    functions."""
    stop, peak = threading.Event(), [0]

    def watch() -> None:
        while not stop.wait(0.005):
            lines = Path("/proc/self/status").read_text().splitlines()
            anonymous = next(line for line in lines if line.startswith("RssAnon"))
            peak[0] = max(peak[0], int(anonymous.split()[1]) << 10)

    jax.devices()
    start_bytes = Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0]
    watcher = threading.Thread(target=watch)
    watcher.start()
    start, processors = time.perf_counter(), time.process_time()
    kept = {"read": read_files, "load": load}[what](directory, dtype)
    seconds = time.perf_counter() - start, time.process_time() - processors
    stop.set()
    watcher.join()
    del kept
    print(json.dumps([*seconds, peak[0] / 1e9 - (int(start_bytes) << 10) / 1e9]))


def main() -> None:
    """See the module."""
    layers, directory, *rest = sys.argv[1:]
    dtype, path = rest[0] if rest else "native", Path(directory)
    if not path.exists():
        write(int(layers), path)
    files = [*path.glob("*.safetensors")]
    size = sum(file.stat().st_size for file in files) / 1e9
    print(f"{size:.2f} GB in {len(files)} files, as {dtype}")
    print("| | cold, s/GB | cached, s/GB | of processors, s/GB | memory / file |")
    print("|---|---|---|---|---|")
    for what in ("read", "load"):
        found = []
        for cold in (True, False):
            for file in files if cold else ():
                with file.open("rb") as opened:
                    os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            command = [sys.executable, __file__, "--one", what, directory, dtype]
            found.append(json.loads(subprocess.check_output(command).splitlines()[-1]))
        figures = found[0][0], *found[1]
        print(f"| {what} | {' | '.join(f'{figure / size:.2f}' for figure in figures)} |")


if __name__ == "__main__":
    if sys.argv[1] == "--one":
        measure(sys.argv[2], Path(sys.argv[3]), sys.argv[4])
    else:
        main()
