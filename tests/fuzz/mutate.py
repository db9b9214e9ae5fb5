"""Mutations: one seed, one change of one file of a clean directory."""

from __future__ import annotations

import gzip
import json
import os
import random
import struct
import zipfile
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

from tests.fuzz import hostile, mutate_gguf
from tests.fuzz.mutate_gguf import NUMBERS

VALUES = [
    *NUMBERS, 0.5, -0.0, 1e-40, 1e39, 1e308, float("inf"), float("-inf"), float("nan"), None, True,
    False, "", "x", "0", "llama", "../../../etc/passwd", "/dev/zero", "..", "a\0b", "\ud800",
    "\U0001f600" * 50, "x" * 100_000, [], {}, [[]], [None], [1, "a"], {"a": {}}, {"content": 3},
    [0] * 100_000,
]  # fmt: skip


def mutate(directory: Path, kind: str, seed: int) -> str:
    """Changes one file below `directory`; returns what was done, in words."""
    rng = random.Random(f"{kind} {seed}")
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    if kind == "orbax":  # what is ours alone; `arrays` has many files
        made = [path for path in files if "made" in path.parts]
        files = rng.choice([[p for p in made if "arrays" not in p.parts], made])
    if kind == "draft":
        files = [path for path in files if "target" not in path.parts]
    if kind == "template":
        files = [path for path in files if path.suffix == ".jinja"]
    path = rng.choice(files)
    how = rng.choices((_structure, _bytes, _instead), (8, 3, 1))[0]
    done = how(path, kind, rng)
    if kind == "distill" and rng.random() < 0.7 and path.name != "manifest.json":
        _vouch(directory, path)
    if kind == "orbax" and rng.random() < 0.7 and "arrays" in path.parts:
        _measure(directory / "made", path)
    return f"{path.relative_to(directory)}: {done}"


def _structure(path: Path, kind: str, rng: random.Random) -> str:
    if path.suffix == ".gguf" and kind.startswith("gguf"):
        return mutate_gguf.mutate(path, kind, rng)
    for suffix, change in _BY_SUFFIX.items():
        if path.name.endswith(suffix):
            return change(path, rng)
    return _bytes(path, kind, rng)


# --- JSON


def _json(path: Path, rng: random.Random) -> str:
    text = path.read_text(encoding="utf-8")
    if rng.random() < 0.15:
        changed, done = _json_text(text, rng)
        path.write_bytes(changed)
        return done
    value, done = json_value(json.loads(text), rng)
    path.write_text(json.dumps(value), encoding="utf-8")
    return done


def json_value(value: Any, rng: random.Random) -> tuple[Any, str]:
    """A JSON value with one place of it changed."""
    places = _places(value)
    holder, key = rng.choice(places) if places else ([value], 0)
    for_better = [place for place in places if not str(place[1]).isdecimal()]
    if for_better and rng.random() < 0.7:  # names, not one of many items
        holder, key = rng.choice(for_better)
    what = rng.choice(("value", "value", "value", "delete", "rename", "nest", "type"))
    if what == "delete" or (what == "rename" and isinstance(holder, list)):
        del holder[key]
    elif what == "rename":
        new = rng.choice(["", "../x", "model_type", "\ud800", "x" * 10_000, str(rng.random())])
        holder[new] = holder.pop(key)
    elif what == "nest":
        for _ in range(rng.choice([1, 90, 120, 900])):
            holder[key] = [holder[key]] if rng.random() < 0.5 else {"a": holder[key]}
    elif what == "type":
        old = holder[key]
        holder[key] = rng.choice([str(old)[:1000], [old], {"a": old}, not old])
    else:
        holder[key] = rng.choice(VALUES)
    return value, f"{what} of {str(key)[:60]!r}"


def _places(value: Any) -> list[tuple[Any, Any]]:
    found, queue = [], [value]
    while queue:
        holder = queue.pop()
        keys = list(holder) if isinstance(holder, dict) else range(len(holder))
        for key in keys:
            found.append((holder, key))
            if isinstance(holder[key], dict | list):
                queue.append(holder[key])
    return found


def _json_text(text: str, rng: random.Random) -> tuple[bytes, str]:
    at = rng.choice([place for place, char in enumerate(text) if char in ":,"] or [0]) + 1
    deep = rng.choice([100, 1000, 100_000, 1_000_000])
    change, done = rng.choice(
        [
            ("[" * deep, "lists without end"),
            ('{"a":' * deep, "objects without end"),
            ("[" * deep + "]" * deep + ",", "deep lists"),
            ("9" * 10_000, "a long number"),
            ("1e999,", "inf"),
            ("[" + "[]," * 1_000_000, "many lists"),
            ('"' + "\\ud800" * 10, "surrogates"),
        ]
    )
    data = (text[:at] + change + text[at:]).encode()
    if rng.random() < 0.2:
        return b"\xef\xbb\xbf" + data, f"{done} and a BOM"
    return data, done


# --- safetensors


def _safetensors(path: Path, rng: random.Random) -> str:
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header, rest = json.loads(data[8 : 8 + length]), data[8 + length :]
    if rng.random() < 0.2:
        length = rng.choice([0, 1, 2**31, 2**63, 2**64 - 1, length - 1, length + 1, len(data)])
        path.write_bytes(struct.pack("<Q", length) + data[8:])
        return f"a header of {length} bytes"
    if rng.random() < 0.3:
        name = rng.choice(sorted(set(header) - {"__metadata__"}))
        tensor = header[name]
        tensor["dtype"] = rng.choice(["F64", "I8", "I64", "BOOL", "F8_E4M3", "U16", "XX", 3])
        done = f"type {tensor['dtype']} of {name}"
    else:
        header, done = json_value(header, rng)
    text = json.dumps(header).encode()
    if rng.random() < 0.1:
        text = text[:-1] + b"," + text[1:]
        done += " and all names twice"
    path.write_bytes(struct.pack("<Q", len(text)) + text + rest)
    return done


# --- others


def _zip(path: Path, rng: random.Random) -> str:
    size = rng.choice([10, 10_000, 60 << 20, 300 << 20])
    names = [
        ["w/m.gguf"], ["w/m.gguf", "w/n.gguf"], [], ["../../m.gguf"], ["/tmp/m.gguf"], ["w/.gguf"],
        ["w/" + "x" * 300 + ".gguf"], ["w/a\nb.gguf"], ["w/\\..\\m.gguf"],
    ]  # fmt: skip
    chosen = rng.choice(names)
    how = rng.choice([zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
    with zipfile.ZipFile(path, "w", how) as archive:
        for name in chosen:
            archive.writestr(name, b"\0" * min(size, 60 << 20 if how else size))
    data = bytearray(path.read_bytes())
    if rng.random() < 0.4:  # flags, method or sizes in the directory at the end
        at = data.rfind(b"PK\1\2") + rng.choice([8, 10, 16, 20, 24, 42])
        data[at : at + 2] = rng.randbytes(2)
        path.write_bytes(data)
    return f"{chosen} of {size} bytes, {how}"


def _toml(path: Path, rng: random.Random) -> str:
    lines = path.read_text(encoding="utf-8").split("\n")
    place = rng.choice([n for n, line in enumerate(lines) if "=" in line])
    key = lines[place].split("=")[0]
    value = rng.choice(
        [
            "[" * 5000, "[" * 120 + "]" * 120, "{a=" * 200 + "1" + "}" * 200, '"x"', "0", "-1",
            "nan", "inf", "1e400", "9" * 30, "9" * 5000, "0x" + "f" * 5000, "true",
            "1979-05-27", "[1, 'a']", "[]", "{}", '""', "'" + "x" * 100_000 + "'",
            '["' + "y" * 9000 + '"]', repr(["s"] * 100), '"\\ud800"', "1.0", "'''", "[{path = 3}]",
            "[[{}]]",
        ]
    )  # fmt: skip
    if rng.random() < 0.15:
        deep = rng.choice([90, 120, 30_000])
        key, value = ".".join(["a"] * deep), "1"
    lines[place] = f"{key} = {value}"
    path.write_text("\n".join(lines), encoding="utf-8")
    return f"{key[:40]}= {value[:40]}"


def _jsonl(path: Path, rng: random.Random) -> str:
    packed = path.suffix == ".gz"
    data = gzip.decompress(path.read_bytes()) if packed else path.read_bytes()
    lines = data.decode().strip().split("\n")
    place = rng.randrange(len(lines))
    if rng.random() < 0.5:
        value, done = json_value(json.loads(lines[place]), rng)
        changed = json.dumps(value).encode()
    elif rng.random() < 0.5:
        changed, done = _json_text(lines[place], rng)
    else:
        changed, done = rng.choice(
            [
                (b"\0" * (140 << 20 if packed else 9 << 20), "zeros"),
                (b'{"prompt": "' + b"a" * (9 << 20) + b'"}', "a line without end"),
                (b'{"prompt": ""}\n' * (1_100_000 if packed else 1000), "many lines"),
                (b"1\n" * (3_000_000 if packed else 3000), "bad lines"),
                (b"\n" * (140 << 20 if packed else 1000), "empty lines"),
                (b"\xff\xfe", "no UTF-8"),
            ]
        )
    data = b"\n".join([*(s.encode() for s in lines[:place]), changed, *(s.encode() for s in lines)])
    path.write_bytes(gzip.compress(data, 1) if packed else data)
    return f"line {place}: {done}"


def _template(path: Path, rng: random.Random) -> str:
    text = path.read_text(encoding="utf-8")
    if rng.random() < 0.6:
        snippet = rng.choice(hostile.TEMPLATES)
        at = rng.choice([0, len(text)])
        path.write_text(text[:at] + snippet + text[at:], encoding="utf-8")
        return f"with {snippet[:70]}"
    tokens = text.replace("{", " {").replace("}", "} ").split(" ")
    for _ in range(rng.choice([1, 3])):
        one, two = rng.randrange(len(tokens)), rng.randrange(len(tokens))
        tokens[one] = rng.choice([tokens[two], "", "(", "{%", "}}", "'", "*", "**", "loop", "-1"])
    path.write_text(" ".join(tokens), encoding="utf-8")
    return "other words"


_BY_SUFFIX: dict[str, Callable[[Path, random.Random], str]] = {
    ".jsonl.gz": _jsonl,
    ".jsonl": _jsonl,
    ".json": _json,
    ".safetensors": _safetensors,
    ".whl": _zip,
    ".toml": _toml,
    ".jinja": _template,
}


def _bytes(path: Path, kind: str, rng: random.Random) -> str:
    data = bytearray(path.read_bytes()) or bytearray(b"\0")
    what = rng.choice(("flip", "flips", "cut", "append", "zeros", "number", "exchange"))
    at = int(len(data) * rng.random() ** 2)  # headers are at the beginning
    if what == "cut":
        del data[at:]
    elif what == "append":
        data += rng.choice([b"\0", b"}", b"[" * 100_000, rng.randbytes(100)])
    elif what == "zeros":
        data[at : at + 64] = b"\0" * len(data[at : at + 64])
    elif what == "number":
        data[at : at + 8] = struct.pack("<Q", rng.choice([n % 2**64 for n in NUMBERS]))
    elif what == "exchange":
        other = rng.randrange(len(data))
        data[at : at + 16], data[other : other + 16] = data[other : other + 16], data[at : at + 16]
    else:
        for _ in range(1 if what == "flip" else 20):
            data[int(len(data) * rng.random() ** 2)] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    return f"{what} at {at}"


def _instead(path: Path, kind: str, rng: random.Random) -> str:
    """Something else in the place of the file."""
    what = rng.choice(
        ("nothing", "empty", "pipe", "directory", "loop", "dangling", "device", "huge")
    )
    path.unlink()
    if what == "empty":
        path.touch()
    elif what == "pipe":
        os.mkfifo(path)
    elif what == "directory":
        path.mkdir()
    elif what == "loop":
        path.symlink_to(path)
    elif what == "dangling":
        path.symlink_to("nowhere")
    elif what == "device":
        path.symlink_to("/dev/zero")
    elif what == "huge":
        path.touch()
        os.truncate(path, 300 << 20)  # a hole, no disk
    return what


def _vouch(directory: Path, path: Path) -> None:
    """Has the manifest vouch for a file as it is."""
    if not path.is_file() or path.stat().st_size > 1 << 20:
        return
    data = path.read_bytes()
    manifest = json.loads((directory / "manifest.json").read_text())
    for entry in manifest["data"]["shards"]:
        for file in (entry, entry["scores"]):
            if file["file"] == path.name:
                file |= {"bytes": len(data), "sha256": sha256(data).hexdigest()}
    (directory / "manifest.json").write_text(json.dumps(manifest))


def _measure(directory: Path, path: Path) -> None:
    manifest = json.loads((directory / "ssd_jax.json").read_text())
    name = path.relative_to(directory / "arrays").as_posix()
    if path.is_file():
        manifest["store"][name] = path.stat().st_size
    (directory / "ssd_jax.json").write_text(json.dumps(manifest))
