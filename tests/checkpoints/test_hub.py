"""`hf:` sources against a cache in the hub's layout and a server that answers as the hub does."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import constants
from huggingface_hub.utils import filter_repo_objects

from ssd_jax.checkpoints.opening import open_checkpoint
from ssd_jax.checkpoints.sources import resolve, resolve_configuration
from ssd_jax.errors import InputError
from tests.checkpoints import tiny_models as tiny

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache, offline."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def put(cache: Path, repo: str, *, revision: str = "main", **model) -> dict[str, np.ndarray]:
    """Stores a tiny model as the hub's client does: blobs, links to them, and a ref."""
    folder = cache / f"models--{repo.replace('/', '--')}"
    plain = cache / "plain"
    tensors = tiny.write_hf(plain, **model)
    snapshot = folder / "snapshots" / COMMIT
    for part in (folder / "blobs", snapshot, folder / "refs"):
        part.mkdir(parents=True)
    for number, file in enumerate(sorted(plain.iterdir())):
        blob = folder / "blobs" / f"{number:040x}"
        file.rename(blob)
        (snapshot / file.name).symlink_to(Path("../../blobs") / blob.name)
    (folder / "refs" / revision).write_text(COMMIT)
    return tensors


@pytest.mark.parametrize("source", ["hf:org/tiny", "hf:org/tiny@main", f"hf:org/tiny@{COMMIT}"])
def test_a_cached_sharded_repository_opens_offline(cache, source):
    tensors = put(cache, "org/tiny", family="qwen2", shards=3)
    checkpoint = open_checkpoint(source)
    assert checkpoint.path.name == COMMIT
    assert checkpoint.config.family == "qwen2"
    assert checkpoint.tensors.shapes.keys() == tensors.keys()
    for name, array in tensors.items():
        np.testing.assert_array_equal(checkpoint.tensors.read(name).astype(np.float32), array)


@pytest.mark.more
def test_the_environment_alone_suffices(tmp_path):
    """HF_HOME and HF_HUB_OFFLINE in a fresh process, as a user sets them."""
    put(tmp_path / "hub", "org/tiny")
    code = (
        "from ssd_jax.checkpoints.opening import open_checkpoint\n"
        "print(open_checkpoint('hf:org/tiny').config.hidden_size)"
    )
    environment = os.environ | {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    environment.pop("HF_HUB_CACHE", None)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == str(tiny.HIDDEN)


def test_another_revision_is_not_in_the_cache(cache):
    put(cache, "org/tiny")
    with pytest.raises(InputError, match=r"hf:org/tiny@v2 is not \(or not wholly\) in the cache"):
        resolve("hf:org/tiny@v2")


def test_offline_and_not_cached_names_the_cache_and_the_remedy(cache):
    with pytest.raises(InputError) as error:
        resolve("hf:org/absent")
    for part in ("hf:org/absent", str(cache), "HF_HUB_OFFLINE", "path to a local copy"):
        assert part in str(error.value)


def test_a_cached_index_without_its_shards_is_incomplete(cache):
    put(cache, "org/tiny", shards=3)
    next(cache.rglob("model-00002-of-00003.safetensors")).unlink()
    with pytest.raises(InputError, match=r"model-00002-of-00003.safetensors is missing"):
        open_checkpoint("hf:org/tiny")


@pytest.mark.parametrize("files", ["config.json", ""])
def test_a_repository_without_safetensors_says_what_to_do(cache, files):
    """As those of GGUF files are: of them nothing, or the configuration, is fetched."""
    put(cache, "org/tiny-GGUF")
    for path in next(cache.rglob(COMMIT)).iterdir():
        if path.name != files:
            path.unlink()
    with pytest.raises(InputError, match=r"org/tiny-GGUF holds no safetensors, or .* GGUF files"):
        open_checkpoint("hf:org/tiny-GGUF")


def test_a_configuration_needs_no_weights(cache):
    put(cache, "org/tiny", shards=3)
    for path in cache.rglob("*.safetensors*"):
        path.unlink()
    path = resolve_configuration("hf:org/tiny") / "config.json"
    assert json.loads(path.read_text())["model_type"]


def test_no_weights_are_asked_for_where_the_configuration_will_do(cache, monkeypatch):
    asked = {}
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download",
        lambda repo, **arguments: asked.update(arguments) or "there",
    )
    assert resolve_configuration("hf:org/tiny@v1") == Path("there")
    assert (asked["allow_patterns"], asked["revision"]) == (["config.json"], "v1")


@pytest.mark.parametrize(
    ("file", "is_fetched"),
    [
        ("tokenizer.json", True),
        ("chat_template.jinja", True),
        ("additional_chat_templates/tool_use.jinja", True),
        ("model.safetensors", True),
        ("consolidated.safetensors", False),
        ("original/model.safetensors", False),
        ("onnx/config.json", False),
        ("tokenizer/vocab.json", False),
        ("text/tokenizer.json", False),
    ],
)
def test_of_folders_only_chat_templates_are_fetched(monkeypatch, tmp_path, file, is_fetched):
    (tmp_path / "model.safetensors").touch()
    asked = {}
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download",
        lambda repo, **arguments: asked.update(arguments) or tmp_path,
    )
    resolve("hf:org/tiny")
    patterns = {name: asked[name] for name in ("allow_patterns", "ignore_patterns")}
    assert [*filter_repo_objects([file], **patterns)] == [file] * is_fetched


@contextlib.contextmanager
def hub_answering(status: int, code: str, monkeypatch) -> Iterator[None]:
    """A server on this host that answers every request with one error of the hub."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            body = json.dumps({"error": code}).encode()
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("X-Error-Message", code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.parametrize(
    ("status", "code", "parts"),
    [
        (403, "GatedRepo", ("is gated", "https://huggingface.co/org/tiny", "HF_TOKEN")),
        (404, "RepoNotFound", ("does not exist on the hub, or is private", "spelling")),
        (404, "RevisionNotFound", ("hf:org/tiny has no revision 'v9'",)),
        (500, "Broken", ("the hub cannot be reached", "path to a local copy")),
    ],
)
def test_refusals_of_the_hub_come_with_a_remedy(cache, monkeypatch, status, code, parts):
    with hub_answering(status, code, monkeypatch), pytest.raises(InputError) as error:
        resolve("hf:org/tiny@v9")
    for part in parts:
        assert part in str(error.value)


@pytest.mark.parametrize("name", ["tiny", "org/tiny/more", "org/tiny@", "", "org/ti ny"])
def test_a_malformed_name_shows_the_form(name):
    with pytest.raises(InputError, match=r"expected hf:org/name or hf:org/name@revision"):
        resolve(f"hf:{name}")
