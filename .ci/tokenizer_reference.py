"""Real vocabularies: the same tokens by each route, those that other programs expect, and chat
prompts beside those of transformers.

    python .ci/tokenizer_reference.py DATA SMOLLM2

DATA holds llama2/, llama3/, mistral/ (tokenizers), text/wiki.test.raw; SMOLLM2 is a model folder.
"""

import itertools
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from sentencepiece import SentencePieceProcessor
from tokenizers import Tokenizer as Reference
from transformers import AutoTokenizer

from testing.tools import TOOLS, with_tools
from tokenizer import Tokenizer

CONVERSATIONS = [
    [("user", "Hello")],
    [
        ("system", "You are brief."),
        ("user", "What is 2 + 2?"),
        ("assistant", "4"),
        ("user", "  And 3 + 3?\n\n"),
    ],
    [("user", "Grüße, 世界 😀\n\tcode: {x: 1}"), ("assistant", "ok")],
    [("user", "a" * 300 + " 1234567890"), ("assistant", " spaced "), ("user", "'s it's I'LL")],
]


def random_texts(n: int, seed: int = 0) -> list[str]:
    """Texts of every plane of Unicode, of white space, digits and apostrophes, in all mixtures."""
    draw = random.Random(seed)
    kinds = [
        lambda: chr(draw.randrange(32, 127)),
        lambda: draw.choice(" \n\t\r  　"),
        lambda: draw.choice("0123456789'’sSdDLl"),
        lambda: chr(draw.randrange(0x20, 0x2FFF)),
        lambda: chr(draw.randrange(0x10000, 0x110000)),
        lambda: chr(draw.randrange(0xE000, 0x10000)),
        lambda: draw.choice(
            ["é", "ß", "中", "한", "🙂", "👩‍🚀", "ﬁ", "٣", "Ⅷ", "½", "\x00", "\x7f"]
        ),
    ]
    return ["".join(draw.choice(kinds)() for _ in range(draw.randrange(1, 40))) for _ in range(n)]


Encode = Callable[[str], list[int]]


def compare(name: str, ours: Tokenizer, encode: Encode, texts: list[str]) -> None:
    """Texts without control tokens, which the other program might find."""
    for text in texts:
        expected = encode(text)
        got = ours.encode(text)
        if expected != got:
            sys.exit(f"{name}: {text[:80]!r}\n  theirs {expected[:40]}\n  ours   {got[:40]}")
        is_whole = not set(ours.missing_bytes) & set(text.encode())
        if is_whole and ours.decode(got) != text:
            sys.exit(f"{name}: {text[:80]!r} does not come back")
    print(f"{name}: equal on {len(texts)} texts of {sum(map(len, texts)):,} characters")


def package(folder: Path) -> Encode:
    """The package `tokenizers`, of the whole file."""
    reference = Reference.from_file(str(folder / "tokenizer.json"))
    return lambda text: reference.encode(text, add_special_tokens=False).ids


def from_model(folder: Path) -> Tokenizer:
    """As it is read where there is no tokenizer.json."""
    with tempfile.TemporaryDirectory() as copy:
        for name in ("tokenizer.model", "tokenizer_config.json"):
            Path(copy, name).write_bytes((folder / name).read_bytes())
        return Tokenizer.load(copy)


def compare_chats(folder: Path) -> None:
    ours = Tokenizer.load(folder)
    reference = AutoTokenizer.from_pretrained(folder)
    for turns, more in itertools.product(CONVERSATIONS, (True, False)):
        messages = [{"role": role, "content": content} for role, content in turns]
        text = reference.apply_chat_template(messages, add_generation_prompt=more, tokenize=False)
        expected = reference(text, add_special_tokens=False).input_ids
        got = ours.chat(messages, add_generation_prompt=more)
        if expected != got:
            sys.exit(
                f"{folder.name}: {messages}\n  transformers {expected}\n  ours         {got}\n"
                f"  {text!r}\n  {ours.decode(got, special=True)!r}"
            )
    print(f"{folder.name}: {2 * len(CONVERSATIONS)} chat prompts equal those of transformers")


def compare_tools() -> None:
    """Functions, a past call with arguments that are an object, and what a tool told."""
    called = {"name": "add", "arguments": {"a": 1.5, "<|endoftext|>": ["é", None]}}
    call = {"id": "x", "type": "function", "function": called}
    messages = [
        {"role": "user", "content": "Hi <|endoftext|>"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "x", "name": "", "content": '{"b": 2}'},
    ]
    for is_tagged in (True, False):
        with tempfile.TemporaryDirectory() as folder:
            target = with_tools(Path(folder, "tiny"), is_tagged)
            reference = AutoTokenizer.from_pretrained(target)
            ours = Tokenizer.load(target)
        text = reference.apply_chat_template(messages, tools=TOOLS, tokenize=False)
        ids = ours.chat(messages, tools=TOOLS)
        if ours.decode(ids) != text:
            sys.exit(f"tools\n  transformers {text!r}\n  ours         {ours.decode(ids)!r}")
    print("tools and their calls are laid out as by transformers")


# As Llama 2 and Mistral lay a conversation out: text, not control tokens, around a message.
INST = (
    "{% for message in messages %}"
    "{% if message.role == 'assistant' %}{{ ' ' + message.content | trim + ' ' + eos_token }}"
    "{% elif message.role == 'system' %}{{ '<<SYS>>\n' + message.content + '\n<</SYS>>\n\n' }}"
    "{% else %}{{ bos_token + '[INST] ' + message.content | trim + ' [/INST]' }}{% endif %}"
    "{% endfor %}"
)


def compare_inst_chats(folder: Path) -> None:
    """The text is transformers', its tokens those of `tokenizers`: transformers 5 does not read
    where a tokenizer.json puts spaces."""
    with tempfile.TemporaryDirectory() as copy:
        for file in folder.glob("*.json"):
            Path(copy, file.name).write_bytes(file.read_bytes())
        Path(copy, "chat_template.jinja").write_text(INST)
        ours = Tokenizer.load(copy)
        layout = AutoTokenizer.from_pretrained(copy)
    reference = Reference.from_file(str(folder / "tokenizer.json"))
    for turns in CONVERSATIONS:
        messages = [{"role": role, "content": content} for role, content in turns]
        text = layout.apply_chat_template(messages, tokenize=False)
        expected = reference.encode(text, add_special_tokens=False).ids
        got = ours.chat(messages)
        if expected != got:
            sys.exit(f"{folder.name}: {text!r}\n  tokenizers {expected}\n  ours       {got}")
    print(f"{folder.name}: {len(CONVERSATIONS)} chat prompts equal those of tokenizers")


def compare_routes(data: Path, texts: list[str]) -> None:
    """Llama 2's vocabulary in each of its files, Llama 3's in both."""
    folder = data / "llama2"
    sentencepiece = SentencePieceProcessor(str(folder / "tokenizer.model")).encode
    expected = (folder / "tokens.txt").read_text("utf-8").split("\n")
    nasty = (folder / "texts.txt").read_text("utf-8").split("\n__ggml_vocab_test__\n")
    of_llama_cpp = {text: [*map(int, ids.split())] for text, ids in zip(nasty, expected)}
    for route in (folder, folder / "vocabulary.gguf", from_model(folder)):
        ours = route if isinstance(route, Tokenizer) else Tokenizer.load(route)
        compare("Llama 2, by sentencepiece", ours, sentencepiece, texts)
        compare("Llama 2, by llama.cpp", ours, of_llama_cpp.get, nasty)
    ours = Tokenizer.load(data / "llama3")
    ranks = from_model(data / "llama3")
    if ranks.difference(ours) or ranks.prompt("x") != ours.prompt("x"):
        sys.exit("Llama 3's tokenizer.model has other tokens than its tokenizer.json")
    compare("Llama 3, by its tokenizer.model", ours, ranks.encode, texts)


def main(data: Path, smollm2: Path) -> None:
    wiki = (data / "text" / "wiki.test.raw").read_text("utf-8")
    texts = [wiki, *random_texts(500)]
    texts = [text for text in texts if "▁" not in text]  # which comes back as a space
    for folder in (data / "llama3", data / "mistral", smollm2):
        compare(folder.name, Tokenizer.load(folder), package(folder), texts)
    compare_routes(data, texts)
    for folder in (data / "llama2", data / "mistral"):
        compare_inst_chats(folder)
    for folder in (data / "llama3", smollm2):
        compare_chats(folder)
    compare_tools()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
