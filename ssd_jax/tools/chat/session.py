"""The session: what each entry does to the conversation, and what is shown of it."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable, Iterable

from rich.table import Table

from ssd_jax.checkpoints.chat.harmony import HarmonyReader, MessagePart, mark_ids, writes_harmony
from ssd_jax.engine.request import Request, RequestOutput
from ssd_jax.errors import InputError
from ssd_jax.llm.llm import LLM
from ssd_jax.options.wording import as_flags
from ssd_jax.sampling.params import SamplingParams
from ssd_jax.system.paths import user_path
from ssd_jax.tools.chat import conversation as files
from ssd_jax.tools.chat.conversation import Conversation
from ssd_jax.tools.chat.entry import COMMANDS, Command, parse
from ssd_jax.tools.chat.figures import Answer, stats_table, summary
from ssd_jax.tools.chat.screen import Screen

_POLL = 0.05  # seconds between looks for a stop


class ChatSession:
    """One chat with a loaded model.

    An answer that is stopped or fails before its first word, or never gets beyond its reasoning, is
    dropped from the conversation, with its question.

    Args:
      ready: called before an answer, once it is known to be possible.
      stopped: asked between the rounds of an answer; True ends it there.

    Attributes:
      conversation: all messages, whether they still fit the context or not.
      refused: number of entries that were refused.
      failed: number of answers that ended with finish_reason `error`.
    """

    def __init__(
        self,
        llm: LLM,
        params: SamplingParams,
        screen: Screen,
        *,
        system: str | None = None,
        load_model: Callable[[], None] = lambda: None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.conversation = Conversation(system=system)
        self.refused = self.failed = 0
        self._llm = llm
        self._params = params
        self._screen = screen
        self._load_model = load_model
        self._should_stop = should_stop
        self._current_mode: str | None = None
        self._first_message = 0  # messages before it are left out of the prompt
        self._num_requests = 0
        self._answers: list[Answer] = []
        tokenizer = llm.tokenizer
        template = tokenizer.get_chat_template() if tokenizer.has_chat_template else None
        self._has_channels = writes_harmony(template)
        self._marks = mark_ids(template, tokenizer.added_tokens)
        self._saved_conversation = self.conversation
        self._commands: dict[str, Callable[[Command], None]] = {
            "help": self._help,
            "mode": self._switch,
            "stats": self._stats,
            "save": self._save,
            "load": self._load,
            "system": self._system,
            "retry": self._retry,
            "reset": self._reset,
        }

    def take(self, raw: str) -> bool:
        """Does what an entry asks for; returns whether to go on."""
        try:
            entry = parse(raw)
            if isinstance(entry, str):
                if entry:
                    self._answer(self.conversation.with_message("user", entry))
            elif entry.name == "exit":
                return False
            else:
                self._commands[entry.name](entry)
        except InputError as error:
            self.refused += 1
            self._screen.error(as_flags(str(error)))
        return True

    @property
    def _mode(self) -> str:
        """The mode of the next answer."""
        if self._current_mode is None:
            self._load_model()
            self._current_mode = self._llm.mode
        return self._current_mode

    def _answer(self, question: Conversation) -> None:
        """Answers the last message of `question`."""
        first_message, ids = self._fit_prompt(question)
        # Each answer has its own randomness, which is the same in a session of the same entries.
        request = self._llm.request(ids, self._params, self._num_requests)
        request = dataclasses.replace(request, visible_ids=self._marks)
        self._num_requests += 1
        if first_message > self._first_message:
            self._screen.note(
                f"[the context of {self._llm.context} tokens is full: the model no longer sees the "
                f"first {first_message} messages; /save writes all of them, /reset starts afresh]"
            )
        self._load_model()
        with self._screen.answer(f"reading {len(ids)} tokens"):
            output, text = self._run(request)
        self.failed += output.finish_reason == "error"
        answer = Answer(mode=self._mode, prompt_tokens=len(ids), output=output)
        reason = output.finish_reason
        if not text and (output.text or reason in ("cancelled", "error")):
            outcome = "ended by an error" if reason == "error" else "ended"
            outcome = "stopped" if answer.stopped else outcome
            self._screen.note(f"[{outcome} before the first word; the conversation is as it was]")
            return
        self._first_message = first_message
        self._answers.append(answer)
        self.conversation = question.with_message("assistant", text, stopped=answer.stopped)
        self._screen.note(summary(answer, self._llm.context))

    def _run(self, request: Request) -> tuple[RequestOutput, str]:
        """Runs a request to its end, or until it is stopped, amid its prompt too.

        Returns: its output, and the text of the answer, which is all of it where the model does not
        set its reasoning apart.
        """
        stopped, output = False, None
        reader, answer = HarmonyReader() if self._has_channels else None, ""
        with self._llm.started([request], self._mode) as caller:
            while output is None:
                if not stopped and self._should_stop():
                    self._llm.stop(caller)
                    stopped = True
                event = caller.poll(_POLL)
                if event is not None:
                    output = event.output
                    if reader is None:
                        answer += self._show([MessagePart("final", None, event.text)])
                    else:
                        answer += self._show(reader.push(event.text))
        return output, answer + self._show(reader.finish() if reader else ())

    def _show(self, pieces: Iterable[MessagePart]) -> str:
        """Prints pieces; returns those of the answer."""
        answer = ""
        for piece in pieces:
            if piece.channel == "analysis" or piece.recipient is not None:
                self._screen.write_reasoning(piece.text)
            elif piece.text:
                self._screen.write_answer(piece.text)
                answer += piece.text
        return answer

    def _fit_prompt(self, question: Conversation) -> tuple[int, list[int]]:
        """Where the prompt starts, to leave room for an answer, and the prompt's ids."""
        context = self._llm.context
        max_prompt = context - min(self._params.most_tokens, context // 4)
        first_message = question.first_that_fits(
            lambda start: len(self._llm.encode(question.prompt(start))),
            max_prompt,
            self._first_message,
        )
        return first_message, self._llm.encode(question.prompt(first_message))

    def _help(self, _command: Command) -> None:
        table = Table.grid(padding=(0, 3, 0, 0))
        for command in COMMANDS.values():
            table.add_row(command.usage, command.text)
        table.add_row('"""', "starts a message of several lines, which ends with the same")
        table.add_row("\\", "at the end of a line: the message goes on in the next")
        table.add_row("Ctrl-C", "stops an answer; at the prompt it clears the line")
        self._screen.show(table)

    def _switch(self, command: Command) -> None:
        available = ", ".join(self._llm.modes)
        if command.argument in self._llm.modes:
            self._current_mode = command.argument
            self._screen.say(f"mode {self._mode}")
        elif command.argument:
            raise InputError(f"{self._unavailable(command.argument)}; available here: {available}")
        elif len(self._llm.modes) > 1:
            self._screen.say(f"mode {self._mode}; available: {available}")
        else:
            self._screen.say(
                f"mode {self._mode}, the only one here; others need a draft: start ssd-jax chat "
                "with --mode=sd --draft=ngram"
            )

    def _unavailable(self, mode: str) -> str:
        config = self._llm.config
        try:  # an impossible mode has its own message
            dataclasses.replace(config, mode=mode, draft=config.draft or "ngram")
        except InputError as error:
            return as_flags(str(error))
        return (
            f"mode {mode} was not prepared; start ssd-jax chat with --mode={mode} "
            "--draft=ngram, or with a draft model"
        )

    def _stats(self, _command: Command) -> None:
        if not self._answers:
            raise InputError("there are no figures before the first answer")
        self._screen.show(stats_table(self._answers, self._llm.context))

    def _save(self, command: Command) -> None:
        if not self.conversation.messages:
            raise InputError("there is nothing to save yet")
        now = datetime.datetime.now()
        path = user_path(command.argument or f"chat-{now:%Y%m%d-%H%M%S}.jsonl")
        replaced = files.save(self.conversation, path, replace=command.forced)
        self._saved_conversation = self.conversation
        self._screen.say(
            f"{'replaced' if replaced else 'saved'} {path.absolute()} "
            f"({len(self.conversation.messages)} messages)"
        )

    def _load(self, command: Command) -> None:
        if not command.argument:
            raise InputError("/load needs the name of a file")
        if self.conversation.messages and self.conversation != self._saved_conversation:
            raise InputError(
                "the conversation so far would be lost; /save it, or /reset to forget it"
            )
        path = user_path(command.argument)
        self.conversation = self._saved_conversation = files.load(path)
        self._first_message = 0
        messages = self.conversation.messages
        also = "" if self.conversation.system is None else " and its system message"
        is_unanswered = bool(messages) and messages[-1].role == "user"
        hint = "; the last waits for an answer: /retry" if is_unanswered else ""
        self._screen.say(f"loaded {len(messages)} messages{also}{hint}")

    def _system(self, command: Command) -> None:
        if not command.argument:
            system = self.conversation.system
            text = "there is none" if system is None else system
            self._screen.say(f"system message: {text}")
            return
        system = None if command.argument == "-" else command.argument
        conversation = dataclasses.replace(self.conversation, system=system)
        self._llm.encode(
            conversation.with_message("user", "?").prompt()
        )  # not every template takes one
        self.conversation = conversation
        self._screen.say("system message removed" if system is None else "system message set")

    def _retry(self, _command: Command) -> None:
        self._answer(self.conversation.without_answer())

    def _reset(self, _command: Command) -> None:
        forgotten = len(self.conversation.messages)
        self.conversation = Conversation(system=self.conversation.system)
        self._first_message = 0
        self._screen.say(f"{forgotten} messages forgotten")
