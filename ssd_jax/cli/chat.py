"""`ssd-jax chat`: talk to a model in the terminal."""

from __future__ import annotations

import functools
import io
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from ssd_jax.cli import settings
from ssd_jax.cli.loading import load, open_llm, params_of, short
from ssd_jax.errors import DeviceError, InputError, SsdError
from ssd_jax.options.wording import as_flags
from ssd_jax.sampling.params import SamplingParams
from ssd_jax.system.cache_dir import cache_dir
from ssd_jax.system.interrupts import Deferred
from ssd_jax.system.paths import require_writable, user_path
from ssd_jax.tools.chat.entry import entries
from ssd_jax.tools.chat.screen import Screen

if TYPE_CHECKING:
    from ssd_jax.llm.llm import LLM
    from ssd_jax.tools.chat.session import ChatSession
    from ssd_jax.tools.chat.terminal import TerminalReader

_REPORTS = ("logprobs", "prompt_logprobs", "logprobs_of")
_FLAGS: settings.FlagSpecs = {
    "system": "system message of the chat",
    "history": (
        "str",
        "auto",
        "input history file, for the arrow keys; auto is in the user's cache, off keeps none",
    ),
}


def run(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit status."""
    values = settings.new_flags(_FLAGS, max_tokens=1024)
    options = settings.parse(values, "chat", arguments, hidden=_REPORTS)
    config = settings.config_of(options)
    if config.chat_template is False:
        raise InputError("chat needs the chat template; leave out --chat_template=false")
    for name in _REPORTS:
        if options[name] not in (None, "raw"):
            raise InputError(f"chat shows no log-probabilities; leave out --{name}")
    history = _history(options)
    params = params_of(config, options, values)
    with open_llm(config) as llm:
        _check_template(llm, options["system"], params)
        from ssd_jax.tools.chat.session import ChatSession  # bad flags must not wait for JAX

        console, interrupts = Console(stderr=True), Deferred(signal.SIGINT)
        is_piped = not sys.stdin.isatty()
        if not is_piped:
            load(llm)
        session = ChatSession(
            llm,
            params,
            Screen(sys.stdout, console),
            system=options["system"],
            # Nothing loads for a pipe if none of its lines can be answered.
            load_model=functools.cache(lambda: load(llm)) if is_piped else lambda: None,
            should_stop=lambda: interrupts.pending,
        )
        if is_piped:
            return _answer_lines(session)
        from ssd_jax.tools.chat.terminal import TerminalReader  # a pipe needs no line editing

        reader = TerminalReader(history)
        title, hint = _header(llm)
        console.print(title, style="bold", markup=False, highlight=False)
        console.print(hint, style="dim", markup=False, highlight=False)
        with interrupts:
            _talk(session, reader, interrupts, console)
            interrupts.clear()
    return 0


def _history(options: Mapping[str, Any]) -> Path | None:
    """The file where entries are kept; None keeps none.

    Raises:
      InputError: entries cannot be kept there.
    """
    history = options["history"]
    if not history:
        raise InputError("history is empty; give a file, auto or off")
    if history in ("auto", "off"):
        return None if history == "off" else cache_dir() / "chat_history"
    path = user_path(history)
    if path.is_dir():
        raise InputError(f"history = '{path}' is a directory; give a file, auto or off")
    require_writable("history", path)
    return path


def _check_template(llm: LLM, system: str | None, params: SamplingParams) -> None:
    """Refuses a model that cannot hold such a conversation, before its weights load."""
    if not llm.tokenizer.has_chat_template:
        raise InputError(
            f"{llm.config.target} has no chat template, so it is no chat model; choose an instruct "
            "model, or complete text with ssd-jax generate"
        )
    messages = [] if system is None else [{"role": "system", "content": system}]
    llm.request([*messages, {"role": "user", "content": "?"}], params)


def _header(llm: LLM) -> list[str]:
    config, source = llm.config, llm.resolved.draft_source
    k = "auto" if config.chooses_k else str(config.speculated)
    draft = f" (draft {short(source)}, k {k})" if source else ""
    return [
        f"{short(config.target)}, mode {llm.mode}{draft}, context {llm.context} tokens",
        "/help lists the commands; Ctrl-C stops an answer, Ctrl-D leaves",
    ]


def _talk(
    session: ChatSession, reader: TerminalReader, interrupts: Deferred, console: Console
) -> None:
    """Holds a conversation at a terminal until the user leaves."""
    should_leave = False
    while True:
        console.print()
        try:
            with interrupts.immediate():
                raw = reader.read()
        except EOFError:
            console.print()
            return
        except KeyboardInterrupt:
            console.print()
            if should_leave and not reader.discarded_text:
                return
            should_leave = not reader.discarded_text
            if should_leave:
                console.print("Ctrl-C again leaves, and so does Ctrl-D", style="dim")
            continue
        should_leave = False
        interrupts.clear()
        try:
            if not session.take(raw):
                return
        except DeviceError as error:  # the conversation can still be saved
            console.print(as_flags(str(error)), style="red", markup=False, highlight=False)


def _answer_lines(session: ChatSession) -> int:
    """Answers the entries of standard input; returns 2 if one was refused."""
    if isinstance(sys.stdin, io.TextIOWrapper):  # bytes that are no text are refused by name
        sys.stdin.reconfigure(errors="surrogateescape")
    for raw in entries(sys.stdin):
        if not session.take(raw):
            break
    if session.failed:
        raise SsdError(f"{session.failed} answers ended with finish_reason error; ask again")
    return InputError.exit_status if session.refused else 0
