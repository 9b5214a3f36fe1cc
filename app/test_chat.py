"""A chat at a pseudo-terminal: commands, line editing, the dimmed prompt; what is told."""

import json
from pathlib import Path

import pytest

from app import cli
from app.chat import TEMPERATURE, Conversation, chat_settings
from checkpoint.generation import GenerationConfig
from errors import UserError
from request import Settings
from testing.programs import Terminal

UP = "\x1b[A"


@pytest.mark.slow
def test_a_chat_at_a_pseudo_terminal(instruct, tmp_path):
    terminal = Terminal("--target", instruct, "--max-tokens", "4", "--seed", "1")
    greeting = terminal.read_until("> ")
    assert "running " in greeting and "keys and values: " in greeting
    assert f"temperature {TEMPERATURE}: the model recommends none" in greeting
    assert "/help; Ctrl-D ends" in greeting
    assert "/save FILE" in terminal.type("/help", "makes a message of it.\r\n> ")
    assert "context: " in terminal.type("hello")
    assert "context: " in terminal.type(UP)  # history: hello again
    assert "(did you mean /save?)" in terminal.type("/sav x")
    file = tmp_path / "chat.json"
    assert "4 messages" in terminal.type(f"/save {file}")
    messages = json.loads(file.read_text())
    assert [message["role"] for message in messages] == ["user", "assistant"] * 2
    assert [message["content"] for message in messages[::2]] == ["hello", "hello"]
    assert "cannot be written" in terminal.type(f"/save {tmp_path}")
    assert "a new conversation begins" in terminal.type("/system be brief")
    assert "'be brief'" in terminal.type("/system")
    assert "context: " in terminal.type("abc" + "\x1b[D" * 3 + "x")  # the cursor moves: xabc
    assert "a new conversation begins" in terminal.type("/reset")
    assert "context: " in terminal.type(" /a message")
    terminal.type(f"/save {file}")
    messages = json.loads(file.read_text())
    assert [message["role"] for message in messages] == ["system", "user", "assistant"]
    assert messages[1]["content"].strip() == "/a message"
    assert terminal.end() == 0


@pytest.mark.slow
def test_the_prompt_is_shown_dimmed_before_its_continuation_and_never_in_a_pipe(capsys):
    flags = ("--max-tokens", "3", "--seed", "1", "Once upon")
    assert cli.main([*flags]) == 0
    out, err = capsys.readouterr()
    terminal = Terminal(*flags)
    seen = terminal.read_until("seed 1")
    assert terminal.process.wait(timeout=60) == 0
    assert "\x1b[2mOnce upon\x1b[0m" + out.rstrip("\n") in seen
    assert "Once upon" not in out and "\x1b" not in out + err


def test_the_temperature_of_a_chat_is_told():
    for asked, recommended, chosen, told in (
        (None, {}, TEMPERATURE, "recommends none"),
        (0.0, {}, 0.0, "as asked for"),
        (None, {"do_sample": True, "temperature": 0.3}, None, "0.3, as the model recommends"),
        (None, {"do_sample": True}, None, "1.0, as the model recommends"),
        (0.2, {"do_sample": True, "temperature": 0.3}, 0.2, "0.2, as asked for"),
    ):
        settings, line = chat_settings(Settings(asked, seed=3), GenerationConfig(recommended))
        assert settings == Settings(chosen, seed=3) and told in line


def test_a_command_that_cannot_be_obeyed_changes_nothing(tmp_path):
    talk = Conversation(False, None, [{"role": "user", "content": "a"}])
    for typed, says in (
        ("/quit", "/quit is not a command: /help lists all"),
        ("/etc/passwd is a file", "a message that begins with / needs a space"),
        ("/system be brief", "needs a chat template"),
        ("/save", "needs the name of a file"),
        (f"/save {Path(tmp_path, 'none', 'x')}", "cannot be written"),
        ("/save ~no-such-user/x", "~no-such-user/x is not a file, or cannot be written"),
    ):
        with pytest.raises(UserError, match=says):
            talk.obey(typed)
    assert talk == Conversation(False, None, [{"role": "user", "content": "a"}])


def test_a_chat_is_saved_in_letters_that_can_be_read(tmp_path):
    talk = Conversation(True, "Größe 😀")
    talk.obey(f"/save {tmp_path / 'chat'}")
    text = (tmp_path / "chat").read_text(encoding="utf-8")
    assert json.loads(text) == [{"role": "system", "content": "Größe 😀"}] and "Größe 😀" in text


def test_of_several_processes_the_first_one_saves(tmp_path, monkeypatch):
    monkeypatch.setattr("app.chat.rank", lambda: 1)
    Conversation(True, "").obey(f"/save {tmp_path / 'chat'}")
    assert not (tmp_path / "chat").exists()
