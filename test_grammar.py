"""Grammars: masks, states, what is refused, and bounds. (test_distribution.py: what is drawn.)"""

import json
import math
import re
from collections.abc import Sequence
from copy import copy
from itertools import product
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batcher import Batcher
from conftest import examples
from drafters import ModelDrafter
from errors import UserError
from generate import Engine, generate
from loading import Model, load_draft
from lookup import LookupDrafter
from request import OutputStream, Request, Settings
from runner import ModelRunner
from speculative import Drawing, Round
from testing.pages import ROOT
from testing.pieces import load, tokenizer_model
from testing.programs import told as table
from testing.toys import END, SPELLING, FourTokens, Letters, Place, grammars, new_tokens, toy_cache
from testing.worlds import RULES
from tokenizer import Tokenizer

pytest.importorskip("llguidance", reason="the extra 'server' is not installed")
import automaton
import bounds
import grammar as grammar_page
from automaton import Grammars, read_schema
from grammar import GrammarState, Masks, forbid
from settings import MAX_GRAMMAR, Grammar, Options

GRAMMARS = grammars()


# ---- Masks and states by themselves


@pytest.fixture(scope="module")
def vocabularies(tmp_path_factory) -> list[tuple[Grammars, int]]:
    """Byte-level BPE and SentencePiece, each with its end-of-text."""
    tiny = Tokenizer.load(ROOT / "models" / "tiny")
    sentencepiece = load(tmp_path_factory.mktemp("spm"), tokenizer_model())
    found = [(tiny, min(tiny.specials.values())), (sentencepiece, 2)]
    return [(Grammars(tokenizer, {end}), end) for tokenizer, end in found]


def bits_of(mask: bytes, count: int) -> list[int]:
    number = int.from_bytes(mask, "little")
    return [i for i in range(count) if number >> i & 1]


@given(
    st.lists(st.text("ab the é\n", min_size=1, max_size=6), min_size=1, max_size=4),
    st.integers(0, 1),
    st.data(),
)
def test_a_mask_holds_the_tokens_that_spell_what_may_follow(vocabularies, texts, which, data):
    """By bytes, whatever the tokenizer would write; on a walk with drafts that are taken back."""
    grammars, end = vocabularies[which]
    tokenizer = grammars.tokenizer
    spelled = [tokenizer.token_bytes(id) for id in range(tokenizer.vocab_size)]
    wanted = [text.encode() for text in texts]
    rule = Grammar("choice", tuple(texts))
    state = GrammarState(grammars, grammars.compile(rule), [])

    def check_mask(so_far: bytes) -> list[int]:
        tokens = [
            id
            for id, word in enumerate(spelled)
            if word and any(text.startswith(so_far + word) for text in wanted)
        ]
        mask = bits_of(state.matcher.compute_bitmask(), tokenizer.vocab_size)
        assert mask == sorted(tokens + [end] * (so_far in wanted))
        return mask

    so_far = b""
    kept: list[int] = []
    for _ in range(4):
        drafted = so_far
        for _ in range(data.draw(st.integers(0, 3))):
            draft = data.draw(st.sampled_from([*check_mask(drafted), 5]))
            state.push(draft)
            if state.drafts_ended:
                break
            drafted += spelled[draft]
        state.settle([])
        token = data.draw(st.sampled_from(check_mask(so_far)))
        state.settle([token])
        assert not state.has_failed
        if token == end:
            break
        so_far += spelled[token]
        kept.append(token)
        forced = b"".join(spelled[token] for token in state.forced(20))
        assert any(text.startswith(so_far + forced) for text in wanted)
    again = GrammarState(grammars, grammars.compile(rule), kept)  # as after preemption
    assert again.matcher.compute_bitmask() == state.matcher.compute_bitmask()


def test_an_error_in_the_worker_is_one_of_the_round():
    """Also if later work succeeds: a row without its mask would be drawn from."""
    request = Request([1], Settings(seed=0))
    request.grammar_state = GrammarState(GRAMMARS, GRAMMARS.compile(Grammar("regex", "ab")), [])
    masks = Masks([request], 2, 4)
    masks.bits = masks.bits[:0]  # no room for the first mask
    masks.start()
    masks.tasks[0].exception()
    masks.bits = torch.full((2, 1), -1, dtype=torch.int32)
    masks.push_all([[0]])
    with pytest.raises(ValueError):
        masks.apply(torch.zeros(2, 4), [0, 0], [0, 1])


def test_a_state_survives_its_drafts():
    """And an error of the package within them."""
    state = GrammarState(GRAMMARS, GRAMMARS.compile(Grammar("regex", "abab")), [0])
    mask = state.matcher.compute_bitmask()
    state.push(1)
    state.matcher.consume_token(1)
    assert state.matcher.is_error()
    state.settle([])
    assert state.matcher.compute_bitmask() == mask


def test_texts_without_a_grammar_need_no_masks():
    free = Request([1], Settings(seed=0))
    masked = Request([1], Settings(seed=0, regex="a"))
    masked.grammar_state = GrammarState(GRAMMARS, GRAMMARS.compile(Grammar("regex", "a")), [])
    assert Round([free, free], [0, 0], Drawing(4), target=Place()).masks is None
    masks = Masks([free, masked], 1, 4)
    logits = torch.zeros(5, 4)
    assert masks.apply(logits, [0, 0], [0, 1]) is logits and not masks.tasks


# ---- With drafts


@pytest.fixture(scope="module")
def model() -> Model:
    return Model.load("tiny", "cpu")


@pytest.mark.parametrize("coupled", [False, True], ids=["exact", "coupled"])
def test_a_text_ends_with_its_grammar_whatever_its_request_ignores(coupled, model):
    """Each kind of grammar, each drafter: behind a drafted end-of-text nothing is made."""

    def texts_of(draft: str | None) -> list[tuple[tuple[int, ...], str]]:
        gamma = None if draft is None else 3
        options = Options(max_len=100, max_batch=8, verify="coupled" if coupled else "block")
        engine = Engine(model, load_draft(draft, model), options, tokens=600)
        requests = []
        for i, rule in enumerate(RULES):
            for ends in ((), model.eos_token_ids):
                temperature = 1.0 if coupled else 0.0
                chosen = Settings(temperature, seed=i, max_tokens=40, gamma=gamma, **rule)
                requests.append(Request(model.encode("Once upon a time"), chosen, ends))
        list(engine.batcher.run(requests))
        accepted = sum(stats.num_accepted for r in requests for stats in r.rounds)
        assert (accepted > 0) == (draft is not None)
        return [(new_tokens(request), request.finish_reason) for request in requests]

    plain = texts_of(None)
    for i, rule in enumerate(RULES):
        ignoring, listening = plain[2 * i : 2 * i + 2]
        assert (ignoring == listening) or not rule
    assert [reason for _, reason in plain].count("stop") >= 2
    for draft in ("tiny-draft", "tiny-eagle", "ngram", "self"):
        assert texts_of(draft) == plain, draft


def test_ngrams_draft_what_the_grammar_forces(model):
    forced = "There was nothing in the text before that looks like this."
    for draft in (None, "ngram"):
        how = dict(gamma=4) if draft else {}
        result = generate("Once", model, draft=draft, seed=1, choice=forced, **how)
        assert result.text == forced and result.finish_reason == "stop"
    assert result.speculation.tokens_per_round > 2


def test_ngrams_draft_only_what_the_grammar_allows():
    for regex, drafts in (("[ab]*", [0, 1]), ("aa*", [0]), ("b*", [])):
        drafter = LookupDrafter()
        request = Request([1, 0, 1, 0, 1], Settings())
        compiled = GRAMMARS.compile(Grammar("regex", regex))
        request.grammar_state = GrammarState(GRAMMARS, compiled, [])
        assert drafter.look_up(request).tokens == drafts
        assert len(drafter.chances(request)) == len(drafts)


# ---- How texts end


def finished(regex: str, gamma: int, seed: int = 3, ends: Sequence[int] = (END,)) -> Request:
    """A text of up to 6 tokens, by a toy that knows texts of 7."""
    chosen = Settings(seed=seed, max_tokens=6, gamma=gamma, regex=regex)
    request = Request([0], chosen, ends)
    target, draft = FourTokens(seed=1), FourTokens(seed=2)
    drafter = ModelDrafter(draft, toy_cache(1)) if gamma else None
    runner = ModelRunner(target, toy_cache(1), Drawing(4), drafter=drafter, grammars=GRAMMARS)
    list(Batcher(runner, 1).run([request]))
    return request


@pytest.mark.parametrize("gamma", [0, 2])
def test_how_a_text_ends(gamma):
    request = finished("abab", gamma)
    assert request.finish_reason == "stop" and request.tokens[-1] == END
    assert finished("(ab)+a{30}", gamma).finish_reason == "length"
    request = finished("ac", gamma)  # no token spells a c
    assert request.tokens == [0, 0, END]
    assert request.finish_reason == "error" and "allows no token" in request.error


@pytest.mark.parametrize("gamma", [0, 2])
def test_a_clients_end_stops_a_text_only_where_its_grammar_may_end(gamma):
    """The client's end is a b, which its text does not show."""
    reasons = set()
    for seed, regex in product(range(8), ("[ab]*a", "a(ba)?b*")):
        request = finished(regex, gamma, seed, ends=(1,))
        *shown, last = new_tokens(request)
        if last == 1:
            is_whole = re.fullmatch(regex, "".join(SPELLING[token] for token in shown))
            assert request.finish_reason == ("stop" if is_whole else "length")
            reasons.add(request.finish_reason)
        elif last == END:
            assert request.finish_reason == "stop"
    assert reasons == {"stop", "length"}


def test_a_result_tells_why_a_text_ended_early(model):
    request = Request([1], Settings(seed=0), model.eos_token_ids)
    request.error = "because"
    result = OutputStream(model.tokenizer, request, "").finish()
    assert (result.finish_reason, result.error) == ("error", "because")


def test_the_text_of_a_reply_keeps_its_first_space(vocabularies):
    """SentencePiece's decoder drops it, and the grammar has followed it."""
    tokenizer = vocabularies[1][0].tokenizer
    tokens = tokenizer.encode("the", is_first=True)
    for rule, wanted in (({}, "the"), (dict(regex=" the"), " the")):
        request = Request([1], Settings(seed=0, **rule), (2,), is_reply=True)
        stream = OutputStream(tokenizer, request, "")
        request.origins = ["plain"] * len(tokens)
        stream.feed(tokens)
        assert stream.finish().text == wanted


# ---- Mistakes

WRONG = [  # setting, value, what is told
    ("schema", "[" * 100_000, "must be a JSON object"),
    ("schema", json.loads('{"items": ' * 200 + "{}" + "}" * 200), "cannot be met"),
    ("grammar", "start: " + '("a"|"b") ' * 66_000, "at most 131,072 are compiled; shorten it"),
    ("grammar", "start: %json " + "[" * 10_000, "%json in the grammar is not valid JSON"),
]
WRONG += [
    (*json.loads(asked).popitem(), told)
    for asked, told in table(
        r"""
        {"schema": "{"} → must be a JSON object
        {"schema": "[1]"} → it is something else
        {"schema": {"type": "strange"}} → Invalid type: strange
        {"schema": {"patternProperties": [5], "pattern": {}}} → cannot be met
        {"schema": {"not": {"type": "null"}}} → Unimplemented keys
        {"schema": {"type": "integer", "minimum": 3, "maximum": 2}} → cannot be met
        {"schema": {"type": "string", "pattern": "(?=a)b"}} → look-ahead
        {"schema": {"const": -9223372036854775808}} → const has -9223372036854775808, and whole num
        {"schema": {"enum": [{"a": [9007199254740993]}]}} → a has 9007199254740993, and whole num
        {"schema": {"minimum": -1e20, "maximum": -1e19, "type": "integer"}} → and whole numbers
        {"schema": {"exclusiveMinimum": 9007199254740992}} → exclusiveMinimum has 9007199254740992
        {"grammar": "start: %json {\"maximum\": 1e999}"} → maximum has inf
        {"regex": "a("} → unclosed group
        {"regex": "a\\\\\\"} → ends with a backslash that escapes nothing; write two
        {"schema": {"patternProperties": {"a\\": {}}}} → expression a\ ends with a backslash
        {"regex": ""} → not empty
        {"regex": "\ud800"} → not empty
        {"choice": []} → must be a text
        {"choice": ["a", ""]} → none of them empty
        {"grammar": "start: one"} → cannot be met: unknown name
        {"grammar": "start: \"a\" %"} → cannot be met: lexer error
        {"grammar": "root ::= \"a\""} → it must be in Lark, which has : for ::= (Expected
        {"grammar": "start: %json {\"type"} → %json in the grammar is not valid JSON
        {"grammar": "start: \"x\" <[3]>"} → names a control token
        {"grammar": "start: <|endoftext|>"} → names a control token
        {"grammar": "# \"\nstart: <[3]> # \""} → names a control token
        """
    )
]


@pytest.mark.parametrize("setting, value, told", WRONG, ids=range(len(WRONG)))
def test_mistakes_are_one_line_before_anything_is_made(setting, value, told, model, monkeypatch):
    monkeypatch.setattr(Engine, "__init__", lambda *arguments, **options: pytest.fail("made"))
    with pytest.raises(UserError) as error:
        generate("Once", model, **{setting: value})
    assert told in str(error.value)
    assert "\n" not in str(error.value) and len(str(error.value)) < 700


def test_what_a_vocabulary_cannot_spell_or_end_is_refused():
    with pytest.raises(UserError, match="no token of this model begins"):
        GRAMMARS.compile(Grammar("regex", "c+"))
    with pytest.raises(UserError, match="no end-of-text"):
        Grammars(Letters(), {99}).compile(Grammar("regex", "a"))


def test_a_schema_has_white_space_only_where_it_says_so(model):
    spaced = model.tokenizer.encode("\n1", is_first=False)
    first = model.tokenizer.encode("[", is_first=False)
    for more, count in (({}, 0), ({"x-guidance": {"whitespace_flexible": True}}, len(spaced))):
        rule = Grammar("schema", json.dumps({"type": "array"} | more))
        start = model.grammars.compile(rule)
        assert len(GrammarState(model.grammars, start, first).allowed(spaced)) == count


def test_formats_that_only_validators_know_are_left_out_of_schemas_and_not_of_values():
    value = {"type": "string", "format": "x"}
    kept = {"const": value, "enum": [value], "default": value, "examples": [value]}
    names = {"format": {"type": "string"}, "type": {"const": value}, "const": {"type": "null"}}
    for schema, read in (
        (value, {"type": "string"}),
        ({"format": "x"}, {}),
        ({"type": ["string", "null"], "format": "x"}, {"type": ["string", "null"]}),
        ({"type": "string", "format": "date"},) * 2,
        ({"properties": {"const": value}}, {"properties": {"const": {"type": "string"}}}),
        ({"anyOf": [kept, value]}, {"anyOf": [kept, {"type": "string"}]}),
        ({"$defs": {"format": {"properties": names}}},) * 2,
    ):
        assert read_schema(json.dumps(schema)) == read


@pytest.mark.parametrize("number", [-(2**53), 2**60, 2**63 - 1])
def test_a_large_number_is_followed_to_the_last_digit(number, model):
    bounds = {"type": "integer", "minimum": number, "maximum": number}
    schema = {"const": {"value": number}}
    assert generate("Once", model, schema=bounds).text == str(number)
    assert generate("Once", model, schema=schema).text == f'{{"value":{number}}}'


def test_strings_of_a_grammar_may_look_like_tokens(model):
    lark = '# <[0]> "\nstart: "<[1]>" /a\\/<[2]b/ // <[3]>'
    assert generate("Once", model, grammar=lark).text == "<[1]>a/<2b"


def test_grammars_are_compiled_once(model):
    rule = Grammar("regex", "one, (two|three)")
    compiled = model.grammars.compile(rule)
    assert model.grammars.compile(Grammar(*rule)) is compiled
    model.grammars.forget()
    assert model.grammars.compile(Grammar(*rule)) is not compiled


# ---- Bounds


def chain(n: int) -> dict:
    """A schema of n definitions, each of which requires the next."""
    schemas = {"d0": {}}
    for i in range(1, n):
        reference = {"$ref": f"#/$defs/d{i - 1}"}
        schemas[f"d{i}"] = {"properties": {"a": reference}, "required": ["a"]}
    return {"$defs": schemas, "$ref": f"#/$defs/d{n - 1}"}


def rules(n: int) -> str:
    """A Lark grammar of n rules and terminals."""
    names = ["start", *(f"r{i}" for i in range(n - 2)), "LAST"]
    lines = [f"{name}: {following}" for name, following in zip(names, names[1:])]
    return "\n".join([*lines, 'LAST: "a: b" // c: d'])


LETTERS, PATTERN, NAMES = (
    MAX_GRAMMAR,
    bounds.MAX_PATTERN_CHARACTERS,
    bounds.MAX_NAMES,
)
PADDING = "a" * (PATTERN - 20)
BOUNDS = [  # what is compiled; what is one more than that; what is told of it
    (dict(choice="a" * LETTERS), dict(choice=["a" * LETTERS, "b"]), "characters:"),
    (
        dict(regex="a" * (PATTERN - 2) + r"\\"),
        dict(regex="a" * (PATTERN + 1)),
        "of regular expressions",
    ),
    (dict(grammar=rules(NAMES)), dict(grammar=rules(NAMES + 1)), "rules and terminals"),
    (
        dict(grammar=f'start: /{PADDING}/ "{"/" * PATTERN}"'),
        dict(grammar=f"start: /{PADDING}/ /{'a' * 20}/"),
        "of regular expressions",
    ),
    (
        dict(grammar='start: %json {"title": "' + "a" * PATTERN + '", "pattern": "a"}'),
        dict(grammar='start: %json {"pattern": "' + "a" * PATTERN + '"} /a/'),
        "of regular expressions",
    ),
    (
        dict(grammar='start: %regex {"substring_chars": "a"}'),
        dict(grammar='start: %regex {"substring_chars": "' + "a" * PATTERN + '"}'),
        "of regular expressions",
    ),
    (
        dict(schema={"const": {"pattern": [], "patternProperties": None, "a": "b" * PATTERN}}),
        dict(schema={"anyOf": [{"pattern": PADDING}, {"patternProperties": {"b" * 21: {}}}]}),
        "of regular expressions",
    ),
    (dict(schema=chain(1500)), dict(schema=chain(3000)), "characters:"),
    (
        dict(schema={"anyOf": [{"multipleOf": each} for each in (5, 0.01)]}),
        dict(schema={"anyOf": [{"multipleOf": each} for each in (99_999.5, 1)]}),
        "remainders of multipleOf",
    ),
    (
        dict(grammar='start: %json {"properties": {"multipleOf": {"multipleOf": 2.5}}}'),
        dict(grammar='start: %json {"multipleOf": 991, "allOf": [{"multipleOf": 997}]}'),
        "remainders of multipleOf",
    ),
]


@pytest.mark.parametrize("within, beyond, told", BOUNDS, ids=range(len(BOUNDS)))
def test_a_grammar_is_bounded_before_it_is_compiled(within, beyond, told, model, monkeypatch):
    """At the bound it compiles: however deep it is, it does not fill the thread's stack."""
    model.grammars.compile(Settings(**within).follows)
    monkeypatch.setattr(automaton, "lark_of", lambda grammar: pytest.fail("compiled"))
    with pytest.raises(UserError, match=f"{told}.* at most [0-9,]+ are compiled; shorten it$"):
        model.grammars.compile(Settings(**beyond).follows)


def test_many_choices_and_properties_are_compiled(model):
    choices = [f"{i} of many" for i in range(5000)]
    assert generate("Once", model, choice=choices, temperature=1.0).text in choices
    schema = {"properties": {f"p{i}": {"type": "integer"} for i in range(1000)}, "type": "object"}
    assert generate("Once", model, schema=schema, max_tokens=9).finish_reason != "error"


AMBIGUOUS = 'start: s\ns: s s | s s s | /[a-z ,.A-Z\\n"!?]/ | ""'


def test_slow_masks_end_their_text_and_no_other(model, monkeypatch):
    """The clock is set so that all masks are slow, then none: what is left is the package's own
    limit. What the package has found out of a grammar that failed is forgotten."""

    def texts(slow_mask: float) -> list[Request]:
        monkeypatch.setattr(grammar_page, "SLOW_MASK", slow_mask)
        engine = Engine(
            model, load_draft("ngram", model), Options(max_len=300, max_batch=4), tokens=2000
        )
        grammars = (None, AMBIGUOUS, None)
        requests = [
            Request(model.encode("Once"), Settings(0, grammar=lark, seed=0, max_tokens=60))
            for lark in grammars
        ]
        list(engine.batcher.run(requests))
        return requests

    monkeypatch.setattr(grammar_page, "SLOW_STEP", 0.0)
    monkeypatch.setitem(automaton.LIMITS, "step_max_items", 2000)
    free, slow, other = texts(0.0)
    assert slow.finish_reason == "error" and "too much work for a mask" in slow.error
    assert len(new_tokens(slow)) <= 3  # the first masks are not timed
    assert free.finish_reason == other.finish_reason == "length"
    compiled = model.grammars.compile(Grammar("grammar", AMBIGUOUS))
    again, limited, _ = texts(1000.0)
    assert new_tokens(again) == new_tokens(free) == new_tokens(other)
    assert len(new_tokens(limited)) > 3 and limited.finish_reason == "error"
    assert model.grammars.compile(Grammar("grammar", AMBIGUOUS)) is not compiled


def test_processes_end_a_slow_text_by_the_clock_of_the_first(model, monkeypatch):
    monkeypatch.setattr(grammar_page, "SLOW_STEP", -1.0)
    monkeypatch.setattr(grammar_page, "SLOW_MASK", -1.0)
    asked = Settings(0, regex="[a-z ]+", seed=0, max_tokens=8)
    for is_slow_there, wanted in ((False, "length"), (True, "error")):
        engine = Engine(model, None, Options(max_len=30))
        group = copy(engine.runner.target.group)
        group.agree = lambda numbers, there=is_slow_there: there if numbers is True else numbers
        with monkeypatch.context() as patch:
            patch.setattr(engine.runner.target, "group", group)
            request = Request(model.encode("Once"), asked)
            list(engine.batcher.run([request]))
        assert request.finish_reason == wanted


def test_a_text_whose_grammar_is_interrupted_leaves_nothing(model, monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    engine = Engine(model, None, Options(max_len=30, max_batch=1, kv="contiguous"))
    asked = Settings(0, regex="[a-z ]+", seed=0, max_tokens=8)
    first, second = (Request(model.encode("Once"), asked) for _ in range(2))
    with monkeypatch.context() as patch:
        patch.setattr("runner.GrammarState", interrupted)
        with pytest.raises(KeyboardInterrupt):
            list(engine.batcher.run([first]))
    assert first.seq is None
    engine.batcher.cancel(first)
    list(engine.batcher.run([second]))  # the cache has one row
    assert len(new_tokens(second)) == 8


def test_so_many_grammars_stay_compiled(model):
    def compiled(i: int) -> object:
        return model.grammars.compile(Grammar("regex", f"a{i}"))

    first, second = compiled(0), compiled(1)
    for i in range(2, automaton.REMEMBERED):
        compiled(i)
    assert compiled(0) is first
    compiled(automaton.REMEMBERED)
    assert compiled(0) is first and compiled(1) is not second


def test_a_request_keeps_its_grammar(model, monkeypatch):
    """The engine compiles none that was compiled early: not at admission, not after preemption."""
    first = model.request(
        "Once", Settings(0, regex="[a-z ]+", seed=0, max_tokens=20), Options(max_len=50)
    )
    requests = [first, first.sibling_text(1)]
    cannot = lambda *arguments: pytest.fail("compiled")  # noqa: E731
    monkeypatch.setattr(Grammars, "submit", cannot)
    list(Engine(model, None, Options(max_len=50, max_batch=2), tokens=200).batcher.run(requests))
    assert all(request.finish_reason for request in requests)


@examples(20)
@given(st.integers(1, 5), st.integers(1, 200), st.integers(0, 2**32))
def test_forbidden_tokens(B, V, seed):
    """Bits beyond the vocabulary are padding; other rows are left alone, and NaN stays."""
    random = Random(seed)
    torch.manual_seed(seed)
    rows = random.sample(range(B), random.randint(1, B))
    num_words = -(-V // 32)
    words = []
    for _ in rows:
        kinds = [0, 2**32 - 1, random.getrandbits(32)]
        words.append(random.choices(kinds, k=num_words))
    masks = torch.tensor(words).to(torch.uint32).view(torch.int32)
    logits = torch.randn(B, V)
    logits[0, 0] = math.nan
    wanted = logits.clone()
    for row, mask in zip(rows, words):
        bias = [0.0 if mask[i // 32] >> i % 32 & 1 else -math.inf for i in range(V)]
        wanted[row] += torch.tensor(bias)
    wide = torch.zeros(B, V + 3)  # rows that are apart
    wide[:, :V] = logits
    by_column = logits.T.contiguous().T
    for x in (logits, wide[:, :V], by_column):
        got = forbid(x, rows, masks)
        assert got.data_ptr() == x.data_ptr()
        torch.testing.assert_close(got, wanted, atol=0, rtol=0, equal_nan=True)
    assert not wide[:, V:].any()
