"""A conversation at a terminal: what a reader types is a message, or a command that begins with /.

Invariant: a command changes the conversation, or says why not; it never ends the chat.
"""

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path

from app.launch import rank
from app.shell import say
from checkpoint.files import write_json
from checkpoint.generation import GenerationConfig
from errors import UserError, nearest
from request import Message, Settings

TEMPERATURE = 0.7  # where the model's makers recommend none: a small model repeats itself at 0
HELP = """\
/reset          forget the conversation
/system TEXT    begin a new one with this system message; without a text: tell the present one
/save FILE      write the messages as JSON, as generate(messages=…) takes them
/help           these lines
Ctrl-C ends an answer, Ctrl-D the chat. A space before a / makes a message of it."""


def edit_lines() -> None:
    """Arrow keys edit the typed line and find earlier ones, where Python has `readline`."""
    with suppress(ImportError):
        import_module("readline")


def typed_line() -> str | None:
    """What the reader types next, blank lines aside; None: the chat ends."""
    while True:
        try:
            typed = input("> ")
            typed.encode()  # UnicodeError for bytes that are not valid text
        except EOFError:
            return None
        except UnicodeError as error:
            say(f"{error}: type it again")
            continue
        if typed:
            return typed


def chat_settings(settings: Settings, recommended: GenerationConfig) -> tuple[Settings, str]:
    """The settings of a chat, and a line that tells the temperature."""
    if settings.temperature is not None:
        return settings, f"temperature {settings.temperature}, as asked for"
    if not recommended.samples:
        settings = replace(settings, temperature=TEMPERATURE)
        return settings, f"temperature {TEMPERATURE}: the model recommends none (--temperature)"
    temperature = recommended.complete({})["temperature"]
    return settings, f"temperature {temperature}, as the model recommends (--temperature)"


@dataclass
class Conversation:
    """The messages so far."""

    uses_template: bool
    system: str | None = None
    messages: list[Message] = field(default_factory=list)

    def obey(self, typed: str) -> None:
        """Do what a command says, and tell it. UserError or OSError says why not."""
        commands: dict[str, Callable[[str], None]] = {
            "/help": lambda rest: say(HELP),
            "/reset": self.reset,
            "/save": self.save,
            "/system": self.set_system,
        }
        word, _, rest = typed.partition(" ")
        if word not in commands:
            raise UserError(
                f"{word} is not a command{nearest(word, commands)}: /help lists all commands; a "
                "message that begins with / needs a space before it"
            )
        commands[word](rest.strip())

    def reset(self, rest: str = "") -> None:
        self.messages.clear()
        say("a new conversation begins")

    def set_system(self, text: str) -> None:
        if not self.uses_template:
            raise UserError("a system message needs a chat template: use an Instruct model")
        if not text:
            say(f"the system message is {self.system!r}" if self.system else "there is none")
            return
        self.system = text
        self.reset()

    def save(self, name: str) -> None:
        """Write the file; of several processes the first one does."""
        if not name:
            raise UserError("/save needs the name of a file: /save chat.json")
        if rank() > 0:
            return
        messages = self.messages
        if self.system is not None:
            messages = [{"role": "system", "content": self.system}, *messages]
        write_json(Path(os.path.expanduser(name)), messages)
        say(f"{name} has {len(messages)} messages")
