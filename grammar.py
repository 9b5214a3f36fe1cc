"""Text that follows a grammar: a JSON schema, a regular expression, a choice, or Lark.

After each token of a text, the grammar allows some tokens and forbids the others: the *mask* of
that prefix. A token is drawn from the target's distribution, restricted to the mask, and
renormalized:

    p̃(x | prefix) ∝ p(x | prefix) · 1[x is allowed after prefix]

So the logits of forbidden tokens become −∞, before temperature and filters. End-of-text is allowed
where the text may end, and is alone where nothing else can follow.

A round of speculation has a mask for each of its rows: the first row's mask follows the text, the
next one's the text and a draft, and so on. Masks on the target's rows make the text exact; masks on
the draft's rows only raise acceptance.

    text {"age":   drafts 4 2 }      rows   {"age":    {"age":4       {"age":42      {"age":42}
                                     mask   a digit    a digit, }     a digit, }     end-of-text

The automaton is that of the package llguidance. It keeps a state for each text, and takes rejected
drafts back. It reads tokens by their bytes, so it allows each token that spells what may follow,
not only the tokens that the tokenizer would write.

An output with a grammar ends where its grammar ends, even if its request ignores end-of-text. A
stop token of the request may end it earlier; where the grammar may not end, finish_reason is then
`length`, because the output was cut. Anybody may send a grammar, and compiling it and computing its
masks take time from other requests:

    bounds.py refuses what would be slow to compile
    an output ends if one of its masks takes too much work         LIMITS
    an output ends if its masks delay a step of all requests       SLOW_STEP, SLOW_MASK

Invariant: between rounds the state of a text has read all its new tokens but end-of-text.
Cost: `python bench.py --target NAME` measures it. Threads of the package make masks while the
target's pass runs; masks within a string of bounded length cost most.
Not covered: a property that is declared, named again with escapes, where more properties are
allowed.

Koo, Liu & He 2024 (arXiv:2407.08103); Dong et al. 2024, XGrammar (arXiv:2411.15100).

    R rows of logits · V vocabulary · W = ⌈V / 32⌉ words of a mask · n masked rows
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, lru_cache
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bounds import check_bounds
from errors import UserError, brief
from kernels import send
from settings import Grammar

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

    from request import Request
    from tokenizer import Tokenizer

REMEMBERED = 16  # compiled grammars; each takes up to some 20 MB
# The work of llguidance for one mask.
LIMITS = {"max_items_in_row": 5000, "step_max_items": 10_000, "step_lexer_fuel": 100_000}
STACK = 2**27  # bytes for the thread that compiles: llguidance recurses, up to once for each name
# Seconds. If the masks of all requests at one depth of drafts take longer than SLOW_STEP, the next
# are timed one by one, and an output ends if one of its own takes longer than SLOW_MASK.
SLOW_STEP = 0.03
SLOW_MASK = 0.01
# Without this, a mask allows only the tokenizer's own spelling where the next bytes are certain.
HEADER = '%llguidance {"no_forcing": true}\n'
# If white space were free, a small model might write nothing else.
FORMATS = (  # those of texts in JSON schemas that are followed
    "date-time time date duration email hostname ipv4 ipv6 uuid uri unknown"
).split()
JSON_OPTIONS = {"x-guidance": {"whitespace_flexible": False}}


# ---- Compiled grammars ---------------------------------------------------------------------------


def load_llguidance() -> ModuleType:
    """The package. UserError if it is not installed."""
    try:
        import llguidance
    except ImportError:
        raise UserError(
            "a schema, regex, choice or grammar needs the package llguidance: "
            "pip install -r requirements-extra.txt"
        ) from None
    return llguidance


class TokenBytes:
    """A vocabulary, as llguidance reads it."""

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
        self._compiled = lru_cache(REMEMBERED)(self._compile)
        self.is_slow = False  # the worker's last masks took longer than SLOW_STEP

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
        """One thread reads drafts and waits for `executor`, so that masks are filled in order."""
        return ThreadPoolExecutor(1, "masks")

    def compile(self, grammar: Grammar) -> LLMatcher:
        """The state before the first token, with its mask. UserError if no text follows the
        grammar, if it cannot be read, or if it is too large."""
        return self.submit(grammar).result()

    def submit(self, grammar: Grammar) -> Future[LLMatcher]:
        """Begin to `compile`, in a thread of its own with a stack that is large enough for every
        grammar within the bounds. The program may end before it does."""
        future: Future[LLMatcher] = Future()
        future.set_running_or_notify_cancel()  # from here on nobody can cancel it

        def work() -> None:
            try:
                future.set_result(self._compiled(grammar))
            except BaseException as error:
                future.set_exception(error)

        before = threading.stack_size(STACK)
        try:
            threading.Thread(target=work, name="compile", daemon=True).start()
        finally:
            threading.stack_size(before)
        return future

    def forget(self) -> None:
        """Forget compiled grammars: texts of one grammar share what llguidance has found out of it,
        even an error."""
        self._compiled.cache_clear()

    def _compile(self, grammar: Grammar) -> LLMatcher:
        llguidance = load_llguidance()
        if not self.eos_token_ids:
            raise UserError(f"this model has no end-of-text, and a {grammar.notation} needs one")
        check_bounds(grammar)
        limits = llguidance.LLParserLimits(**LIMITS)
        lark = HEADER + lark_of(grammar)
        matcher = llguidance.LLMatcher(self.vocabulary, lark, log_level=0, limits=limits)
        matcher.compute_bitmask()
        if not matcher.is_error():
            return matcher
        # Leave out the place in our Lark, which the user has not written.
        wrong = re.split(r"\n +1 \||\n<", matcher.get_error())[0]
        wrong = re.sub(r"^(at )?\d+\(\d+\): ", "", wrong)
        if wrong == "NoExtensionBias":
            wrong = "no token of this model begins such a text"
        if grammar.notation == "grammar" and "::=" in grammar.text:  # as llama.cpp writes it
            wrong = f"it must be in Lark, which has : for ::= ({wrong})"
        raise UserError(f"{grammar} cannot be met: {brief(wrong)}")


def lark_of(grammar: Grammar) -> str:
    """The grammar in Lark, which llguidance reads."""
    if grammar.notation == "schema":
        return "start: %json " + json.dumps(JSON_OPTIONS | read_schema(grammar.text))
    if grammar.notation == "regex":
        compiled = load_llguidance().LLMatcher.grammar_from_regex(grammar.text)
        return json.loads(compiled)["grammars"][0]["lark_grammar"]
    if grammar.notation == "choice":
        # The texts are one terminal: as alternatives of a rule they would take an item each.
        return "start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, grammar.text))
    return grammar.text


def read_schema(text: str) -> dict[str, Any]:
    """A JSON schema without formats that only validators know (llguidance refuses these)."""

    def without(part: dict[str, Any]) -> dict[str, Any]:
        if part.get("type") == "string" and part.get("format") not in FORMATS:
            part.pop("format", None)
        return part

    return json.loads(text, object_hook=without)


# ---- The state of a text -------------------------------------------------------------------------


class GrammarState:
    """How far a text has come in its grammar. tokens: the text's new tokens so far."""

    def __init__(self, grammars: Grammars, compiled: LLMatcher, tokens: Iterable[int]):
        self.grammars = grammars
        self.compiled = compiled
        self.tokens: list[int] = []  # the text's tokens that were followed so far
        # No token is allowed, the grammar has become too large, or its masks take too long.
        self.has_failed = False
        self._rewind()
        self._follow(tokens)

    def _rewind(self) -> None:
        """Go back to the text's tokens, whatever the matcher has read."""
        self.matcher = self.compiled.deep_copy()
        self.matcher.try_consume_tokens(self.tokens)
        self.num_drafts = 0  # drafts that the matcher has read after them
        self.is_lost = False  # a draft came that the grammar forbids, or that ends the text

    def _follow(self, new: Iterable[int]) -> None:
        for token in new:
            if token in self.grammars.eos_token_ids:
                # A mask also allows end-of-text where no token may follow, and after an error. It
                # is a fault unless the output may end here.
                self.matcher.compute_bitmask()
                self.has_failed |= self.matcher.is_error() or not self.matcher.is_accepting()
                return
            self.tokens.append(token)
            if not self.matcher.try_consume_tokens([token]):
                self.has_failed = True

    @property
    def may_end(self) -> bool:
        """Whether the text may end after the tokens that were followed."""
        return self.matcher.is_accepting()

    def push(self, token: int) -> None:
        """Read a draft; none after one that the grammar forbids or that ends the text."""
        if self.is_lost:
            return
        # The matcher reads neither end-of-text nor −1 (no draft, or logits that were not finite).
        is_end = token in self.grammars.eos_token_ids
        if is_end or token < 0 or not self.matcher.try_consume_tokens([token]):
            self.is_lost = True
        else:
            self.num_drafts += 1

    def settle(self, new: Iterable[int]) -> None:
        """A round is over: take its drafts back, and follow the tokens that it made."""
        if not self.matcher.rollback(self.num_drafts):  # after an error it cannot go back
            self._rewind()
        self.num_drafts = 0
        self.is_lost = False
        self._follow(new)
        if self.has_failed:
            self.grammars.forget()

    def fill_timed(self, mask: Tensor) -> None:
        """In the worker: fill a mask, int32[W], and end the text if that takes too long."""
        start = time.thread_time()
        self.matcher.unsafe_compute_mask_ptr(mask.data_ptr(), mask.nbytes)
        self.has_failed |= time.thread_time() - start > SLOW_MASK

    def allowed(self, tokens: Sequence[int]) -> list[int]:
        """The first of these tokens, as many as may follow the text. This changes nothing."""
        return list(tokens[: self.matcher.validate_tokens(list(tokens))])

    def forced(self, count: int) -> list[int]:
        """At most `count` tokens that must follow the text. This changes nothing."""
        text = self.matcher.compute_ff_bytes().decode(errors="ignore")
        tokens = self.grammars.tokenizer.encode(text, is_first=False)
        return self.allowed(tokens[:count])


# ---- The masks of a round ------------------------------------------------------------------------


class Masks:
    """The masks of all texts of a round that have a grammar: width = k + 1 rows for each.

    A bit says whether a token is allowed. All bits are set in rows after a draft that the grammar
    forbids, or that ends the text: nobody reads these. From `start` until `GrammarState.settle` the
    states belong to the worker; before `start` a drafter may ask them. `texts` are places in the
    round. In a round: the drafter pushes each draft; the runner pushes the rest and starts; the
    target's pass runs; `apply` waits for the masks; `settle` takes the drafts back.
    """

    def __init__(self, requests: Sequence[Request], width: int, vocab_size: int):
        self.states: dict[int, GrammarState] = {}
        self.first_rows: dict[int, int] = {}  # each text's row of `bits` before its drafts
        for b, request in enumerate(requests):
            if request.grammar_state is not None:
                self.first_rows[b] = len(self.states) * width
                self.states[b] = request.grammar_state
                self.grammars = request.grammar_state.grammars  # all texts have the same
        words = -(-vocab_size // 32)
        self.bits = torch.full((len(self.states) * width, words), -1, dtype=torch.int32)  # [n, W]
        # The worker's tasks: the masks of the texts as they are, then those after each draft.
        self.works: list[Future] = []

    def start(self) -> None:
        """Let the worker fill the masks of the texts as they are, if nobody has yet."""
        if not self.works:
            self.works = [self.grammars.worker.submit(self._fill, 0, [*self.states])]

    def push(self, texts: Iterable[int], tokens: Iterable[int]) -> None:
        """Let the worker read the next draft of these texts, and fill the masks after it."""
        self.start()
        drafts = {b: token for b, token in zip(texts, tokens) if b in self.states}
        self.works.append(self.grammars.worker.submit(self._read, len(self.works), drafts))

    def push_all(self, drafted: Sequence[Sequence[int]]) -> None:
        """Push the drafts of a round, [B, k], that were not pushed when they were made."""
        self.start()
        num_pushed = len(self.works) - 1  # the first task has the masks before any draft
        for tokens in [*zip(*drafted)][num_pushed:]:
            self.push(range(len(tokens)), tokens)

    def _read(self, depth: int, drafts: dict[int, int]) -> None:
        """In the worker: read a draft of each text, then fill the masks after it."""
        for b, token in drafts.items():
            self.states[b].push(token)
        self._fill(depth, drafts)

    def _fill(self, depth: int, texts: Iterable[int]) -> None:
        """In the worker: fill the masks of these texts after `depth` drafts."""
        wanted = []
        for b in texts:
            if not self.states[b].is_lost:
                wanted.append((self.states[b], self.first_rows[b] + depth))
        start = time.perf_counter()
        if self.grammars.is_slow:
            for state, row in wanted:
                state.fill_timed(self.bits[row])
        elif wanted:
            jobs = [(state.matcher, row) for state, row in wanted]
            num_rows, words = self.bits.shape
            address = self.bits.data_ptr()
            self.grammars.executor.unsafe_compute_mask_ptr(jobs, address, 4 * words, num_rows)
        self.grammars.is_slow = time.perf_counter() - start > SLOW_STEP

    def apply(self, logits: Tensor, texts: Sequence[int], depth: int) -> Tensor:
        """Set the logits of all tokens that their row's mask forbids to −∞, in place.

        logits: [R, V]; texts: the text of each row. The first row of a text comes after `depth`
        drafts, its next row after one draft more.
        """
        masked = []  # rows of `logits`
        masks = []  # their rows of `bits`
        seen = Counter[int]()
        for row, b in enumerate(texts):
            if b in self.states:
                masked.append(row)
                masks.append(self.first_rows[b] + depth + seen[b])
                seen[b] += 1
        if not masked:
            return logits
        self.start()
        for work in self.works:
            work.result()
        return forbid(logits, masked, self.bits[masks])


def forbid(logits: Tensor, rows: Sequence[int], masks: Tensor) -> Tensor:
    """Add −∞ to each logit of these rows whose bit is 0, in place.

    logits: [R, V]; masks: int32[n, W], on the host, for n rows. Token i has a bit in word i // 32;
    the lowest bit comes first.
    """
    device = logits.device
    numbers = torch.arange(256, device=device)
    places = torch.arange(8, device=device)
    bits = numbers[:, None] >> places & 1  # of each byte: [256, 8]
    table = bits.to(logits.dtype).log()  # 0 or −∞
    each_byte = send(masks.contiguous().view(torch.uint8).int(), device)  # [n, 4 W]
    bias = F.embedding(each_byte, table)
    bias = bias.flatten(1)
    V = logits.shape[1]
    return logits.index_add_(0, send(rows, device), bias[:, :V])


def main() -> None:
    """The demonstration counts the tokens that may follow, after each token of a text."""
    model = Model.load("tiny", "cpu")
    asked = Grammar("regex", "(Tom|Lily) saw [0-9]{1,2} dogs?\\.")
    state = GrammarState(model.grammars, model.grammars.compile(asked), [])
    for token in model.encode("Tom saw 12 dogs."):
        state.settle([token])
        mask = int.from_bytes(state.matcher.compute_bitmask(), "little")
        text = model.tokenizer.decode([token])
        print(f"{text!r:8} then one of {mask.bit_count()} tokens")


if __name__ == "__main__":
    from loading import Model

    main()
