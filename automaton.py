"""Compiling a grammar: from what a user asks for to llguidance's automaton.

A user asks for a JSON schema, a regular expression, a choice of texts, or a grammar in Lark. The
package llguidance reads Lark, so the first three are translated, and makes an automaton that reads
the model's tokens:

    Grammar (settings.py)  →  check_bounds (bounds.py)  →  lark_of  →  LLMatcher, the automaton

The automaton reads tokens by their bytes, so it allows each token that spells what may follow, not
only the tokens that the tokenizer would write. grammar.py makes masks with it.

Anybody may send a grammar to a server, so its cost is bounded three times: bounds.py refuses what
is slow to compile, LIMITS end an output whose masks take too much work, and grammar.py measures how
long masks take.

Cost: compiling takes milliseconds to seconds, in a thread of its own, and once for each grammar:
the last REMEMBERED automata are kept.
Not covered: where a schema allows additional properties, a declared name that is spelled with
escapes counts as an additional property.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, lru_cache, partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from bounds import check_bounds
from errors import UserError, brief
from settings import Grammar

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

    from tokenizer import Tokenizer

REMEMBERED = 16  # automata; each takes up to some 20 MB
# Of llguidance's parser, for one mask: its items, and the work of its lexer.
LIMITS = {"max_items_in_row": 5000, "step_max_items": 10_000, "step_lexer_fuel": 100_000}
STACK = 2**27  # bytes, because llguidance recurses once for each rule of a grammar
# Without this, where the next bytes are certain, a mask allows only the tokenizer's own spelling.
HEADER = '%llguidance {"no_forcing": true}\n'
# The formats of strings in a schema that llguidance follows. It refuses others, so they are left
# out: JSON Schema leaves formats to validators.
FORMATS = "date-time time date duration email hostname ipv4 ipv6 uuid uri unknown".split()
BY_NAME = {"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"}
DATA = {"const", "enum", "default", "examples"}  # fields of a schema that hold no schemas
# If white space were free, a small model might write nothing else.
JSON_OPTIONS = {"x-guidance": {"whitespace_flexible": False}}


def load_llguidance() -> ModuleType:
    """The package. UserError if it is not installed."""
    try:
        import llguidance
    except ImportError:
        raise UserError(
            "a schema, regex, choice or grammar needs the package llguidance: "
            "pip install '.[server]'"
        ) from None
    return llguidance


class TokenBytes:
    """A vocabulary, with the attributes that llguidance asks a tokenizer for."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: Sequence[int]):
        self.tokenizer = tokenizer
        self.eos_token_id = eos_token_ids[0]
        self.tokens = [tokenizer.token_bytes(id) for id in range(tokenizer.vocab_size)]
        self.special_token_ids = list(eos_token_ids)  # other control tokens spell b""

    def __call__(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, is_first=False)


class Grammars:
    """The compiled grammars of a model. Nothing is imported or made before the first one."""

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: Collection[int]):
        self.tokenizer = tokenizer
        self.eos_token_ids = sorted(id for id in eos_token_ids if id < tokenizer.vocab_size)
        self._remembered = lru_cache(REMEMBERED)(self._compile)
        self.is_slow = False  # whether the last masks took longer than grammar.SLOW_STEP

    def compile(self, grammar: Grammar) -> LLMatcher:
        """The automaton before the first token, with its mask computed. UserError if the grammar
        cannot be read, is too large, or allows no output."""
        return self.submit(grammar).result()

    def submit(self, grammar: Grammar) -> Future[LLMatcher]:
        """Begin to `compile` in a thread, and return at once."""
        return run_in_thread(partial(self._remembered, grammar))

    def forget(self) -> None:
        """Forget all automata. The outputs of a grammar share parts that llguidance makes as it
        goes, so after an error in one output, later ones might meet it, too."""
        self._remembered.cache_clear()

    def _compile(self, grammar: Grammar) -> LLMatcher:
        llguidance = load_llguidance()
        if not self.eos_token_ids:
            raise UserError(
                f"this model has no end-of-text token, and a {grammar.notation} needs one"
            )
        check_bounds(grammar)
        limits = llguidance.LLParserLimits(**LIMITS)
        lark = HEADER + lark_of(grammar)
        matcher = llguidance.LLMatcher(self.vocabulary, lark, log_level=0, limits=limits)
        matcher.compute_bitmask()  # some errors are only found by the first mask
        if matcher.is_error():
            raise UserError(f"{grammar} cannot be met: {explain(matcher.get_error(), grammar)}")
        return matcher

    @cached_property
    def vocabulary(self) -> LLTokenizer:
        tokens = TokenBytes(self.tokenizer, self.eos_token_ids)
        n = self.tokenizer.vocab_size
        return load_llguidance().LLTokenizer(tokens, n_vocab=n, eos_token=self.eos_token_ids)

    @cached_property
    def executor(self) -> LLExecutor:
        """llguidance's threads, which fill masks: half as many as the target's pass has."""
        return load_llguidance().LLExecutor(max(1, torch.get_num_threads() // 2))

    @cached_property
    def worker(self) -> ThreadPoolExecutor:
        """The worker thread of grammar.py. There is one, so its tasks run in order."""
        return ThreadPoolExecutor(1, "masks")


def run_in_thread(function: Callable[[], Any]) -> Future:
    """Call the function in a new thread with a stack of STACK bytes -> its result, or its error.
    The program may end before the thread does, which a ThreadPoolExecutor would not allow."""
    future = Future()
    future.set_running_or_notify_cancel()  # from here on nobody can cancel it

    def work() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    before = threading.stack_size(STACK)  # of all threads that start from now on
    try:
        threading.Thread(target=work, name="compile", daemon=True).start()
    finally:
        threading.stack_size(before)
    return future


def lark_of(grammar: Grammar) -> str:
    """The grammar in Lark."""
    if grammar.notation == "schema":
        return "start: %json " + json.dumps(JSON_OPTIONS | read_schema(grammar.text))
    if grammar.notation == "regex":
        compiled = load_llguidance().LLMatcher.grammar_from_regex(grammar.text)
        return json.loads(compiled)["grammars"][0]["lark_grammar"]
    if grammar.notation == "choice":
        # One terminal, because each alternative of a rule would count towards LIMITS.
        return "start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, grammar.text))
    return grammar.text


def read_schema(text: str) -> dict[str, Any]:
    """A JSON schema without the formats that llguidance refuses."""
    schema = json.loads(text)
    parts = [schema]
    while parts:
        part = parts.pop()
        if isinstance(part, list):
            parts += part
        if not isinstance(part, dict):
            continue
        if isinstance(part.get("format"), str) and part["format"] not in FORMATS:
            del part["format"]
        for name, value in part.items():
            if name in BY_NAME and isinstance(value, dict):  # properties may be named "format"
                parts += value.values()
            elif name not in DATA:
                parts.append(value)
    return schema


def explain(error: str, grammar: Grammar) -> str:
    """llguidance's error in one line, without the place in our Lark, which no user has written."""
    # "at 2(7): unknown name x\n   1 | start: …" -> "unknown name x"
    wrong = re.split(r"\n +\d+ \||\n<", error)[0]
    wrong = re.sub(r"^(at )?\d+\(\d+\): ", "", wrong)
    if wrong == "NoExtensionBias":
        wrong = "no token of this model begins such a text"
    if grammar.notation == "grammar" and "::=" in grammar.text:  # as llama.cpp writes it
        wrong = f"it must be in Lark, which has : for ::= ({wrong})"
    return brief(wrong)


def main() -> None:
    """The demonstration: what compiling takes, for one grammar of each notation. The first one also
    reads the vocabulary."""
    model = Model.load("tiny", "cpu")
    asked = {
        "schema": '{"type": "object", "properties": {"age": {"type": "integer"}}}',
        "regex": "[0-9]{4}-[0-9]{2}-[0-9]{2}",
        "choice": ("yes", "no"),
        "grammar": 'start: "a" start "b" | "ab"',
    }
    for notation, text in asked.items():
        start = perf_counter()
        automaton = model.grammars.compile(Grammar(notation, text))
        milliseconds = 1e3 * (perf_counter() - start)
        mask = int.from_bytes(automaton.compute_bitmask(), "little")
        print(f"{notation:8} {milliseconds:6.1f} ms, then one of {mask.bit_count()} tokens")


if __name__ == "__main__":
    from time import perf_counter

    from loading import Model

    main()
