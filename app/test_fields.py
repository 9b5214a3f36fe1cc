"""The fields of OpenAI's, vLLM's, llama.cpp's and SillyTavern's requests: each is honoured, refused
by name, or harmless; alone, and at random beside others.

KINDS tells what each is, and this is seen in what is read of a body, or in its answer. TEST_TIMES
(conftest.py) makes more bodies: .ci/run makes 2,000.
"""

import json
import random
import re
from collections import Counter
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("app.server", reason="requirements-extra.txt is not installed")
from app import fields
from app.asgi import HttpError
from app.openai import Offer
from conftest import TIMES
from errors import UserError
from generate import generate
from loading import Model
from request import Settings
from testing.http import CHAT, COMPLETE, PROMPT, ask, read, run
from testing.programs import told as table

HAS_GRAMMARS = bool(find_spec("llguidance"))
OPENAI_CHAT = """
audio frequency_penalty function_call functions logit_bias logprobs max_completion_tokens max_tokens
messages metadata modalities model moderation n parallel_tool_calls prediction presence_penalty
prompt_cache_key prompt_cache_options prompt_cache_retention reasoning_effort response_format
safety_identifier seed service_tier stop store stream stream_options temperature tool_choice tools
top_logprobs top_p user verbosity web_search_options
"""
OPENAI_COMPLETIONS = """
best_of echo frequency_penalty logit_bias logprobs max_tokens model n presence_penalty prompt seed
stop stream stream_options suffix temperature top_p user
"""
VLLM = """
model frequency_penalty logit_bias logprobs max_tokens n presence_penalty response_format seed stop
stream stream_options temperature top_p user use_beam_search top_k min_p repetition_penalty
watermarking length_penalty stop_token_ids include_stop_str_in_output ignore_eos min_tokens
skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens truncation_side
prompt_logprobs logprob_token_ids allowed_token_ids bad_words echo add_special_tokens
structured_outputs priority request_id session_id return_tokens_as_token_ids return_token_ids
routed_experts_prompt_start return_token_offsets return_mm_kwargs cache_salt kv_transfer_params
ec_transfer_params vllm_xargs repetition_detection stream_interval thinking_token_budget best_of
guided_json guided_regex guided_choice guided_grammar guided_decoding_backend
guided_whitespace_pattern logits_processors
"""
VLLM_CHAT = """
messages top_logprobs max_completion_tokens tools tool_choice reasoning_effort include_reasoning
parallel_tool_calls add_generation_prompt continue_final_message documents chat_template
chat_template_kwargs media_io_kwargs mm_processor_kwargs return_prompt_text
"""
VLLM_COMPLETIONS = "prompt suffix prompt_embeds"
LLAMA_CPP = """
timings_per_token stream stream_options cache_prompt return_tokens return_progress max_tokens
n_predict max_completion_tokens n_indent n_keep n_discard n_cmpl n n_cache_reuse t_max_prompt_ms
t_max_predict_ms response_fields top_k top_p min_p top_n_sigma xtc_probability xtc_threshold
typical_p temperature dynatemp_range dynatemp_exponent repeat_last_n repeat_penalty
frequency_penalty presence_penalty dry_multiplier dry_base dry_allowed_length dry_penalty_last_n
dry_sequence_breakers mirostat mirostat_tau mirostat_eta adaptive_target adaptive_decay seed n_probs
min_keep backend_sampling post_sampling_probs speculative.n_min speculative.n_max speculative.p_min
speculative.type speculative.ngram_size_n speculative.ngram_size_m speculative.ngram_m_hits logprobs
lora json_schema grammar grammar_lazy grammar_triggers preserved_tokens chat_format reasoning_format
thinking_forced_open parse_tool_calls chat_parser reasoning_budget_tokens reasoning_budget_start_tag
reasoning_budget_end_tag reasoning_budget_message reasoning_budget_arm_immediately logit_bias
ignore_eos stop samplers id_slot image_data penalize_nl
"""
SILLY_TAVERN = """
prompt model max_new_tokens max_tokens logprobs temperature top_p typical_p typical sampler_seed
min_p repetition_penalty frequency_penalty presence_penalty top_k skew min_length min_tokens
num_beams length_penalty early_stopping add_bos_token dynamic_temperature dynatemp_low dynatemp_high
dynatemp_range dynatemp_exponent smoothing_factor smoothing_curve stopping_strings stop
truncation_length ban_eos_token skip_special_tokens include_reasoning top_a tfs epsilon_cutoff
eta_cutoff mirostat_mode mirostat_tau mirostat_eta custom_token_bans banned_strings api_type
api_server legacy_api sampler_order sampler_priority samplers xtc_threshold xtc_probability nsigma
top_n_sigma min_keep rep_pen rep_pen_range repetition_penalty_range encoder_repetition_penalty
no_repeat_ngram_size penalty_alpha temperature_last do_sample seed guidance_scale negative_prompt
grammar_string json_schema repeat_penalty tfs_z repeat_last_n n_predict mirostat ignore_eos n
best_of spaces_between_special_tokens grammar dry_allowed_length dry_multiplier dry_base
dry_sequence_breakers dry_penalty_last_n speculative_ngram logit_bias cache_prompt
adaptive_target adaptive_decay
"""
OTHERS = (
    "min_new_tokens safe_prompt origins extra_body enable_thinking thinking stream_otpions message "
    "special"
)
CHATS = (OPENAI_CHAT, VLLM + VLLM_CHAT, LLAMA_CPP + "messages", OTHERS)
INSIDE = """
name tool_calls refusal annotations prefix partial reasoning reasoning_content cache_control
prompt_cache_breakpoint include_obfuscation disable_fallback disable_any_whitespace
disable_additional_properties type
"""
COMPLETIONS = (OPENAI_COMPLETIONS, VLLM + VLLM_COMPLETIONS, LLAMA_CPP, SILLY_TAVERN, OTHERS)

# A name (of one path, or of both), its kind, a value that asks for something, those that do not.
KINDS = """
model honoured "tiny"
messages honoured [{"role":"user","content":"Lily"}]
prompt honoured "Lily"
n honoured 2 1
n_cmpl honoured 2 1
stop honoured ["x","e"] []
stopping_strings honoured ["x","e"] []
max_tokens honoured 3
max_completion_tokens honoured 4.0
max_new_tokens honoured 3
n_predict honoured 3
temperature honoured 0.75
top_k honoured 7
top_p honoured 0
min_p honoured 0.25
seed honoured 5 -1
sampler_seed honoured 5 -1
stop_token_ids honoured [261] []
ignore_eos honoured true false
logprobs@chat honoured true false
logprobs@completions honoured 2
top_logprobs@chat honoured 3 0
stream honoured true false
stream_options honoured {"include_usage":true} {} {"include_obfuscation":false}
origins honoured true false
special@completions honoured true false
special@chat refused true false
response_format honoured {"type":"json_object","schema":{"enum":[12]}} {"type":"text"}
json_schema honoured {"name":"it","schema":{"const":7}}
structured_outputs honoured {"choice":["ab","cd"]} {} {"json_object":false}
tools refused [{"type":"function","function":{"name":"f"}}] []
tool_choice refused "required" "none" "auto"
functions refused [{}] []
function_call refused {"name":"f"} "none" "auto"
audio refused {"voice":"x"}
modalities refused ["text","audio"] ["text"]
moderation refused {"x":1}
prediction refused {"type":"content","content":"x"}
reasoning_effort refused "medium" "none"
reasoning_format refused "deepseek" "none" "auto"
include_reasoning refused false true
thinking_token_budget refused 5 -1
reasoning_budget_tokens refused 5 -1
thinking_forced_open refused true false
thinking refused {"type":"enabled"}
enable_thinking refused false
verbosity refused "low" "medium"
store refused true false
web_search_options refused {}
suffix refused "end" ""
echo@chat refused true false
echo@completions honoured true false
prompt_embeds refused "x"
prompt_logprobs refused 0
truncate_prompt_tokens refused 4
add_generation_prompt refused false true
continue_final_message refused true false
add_special_tokens@chat refused true false
add_special_tokens@completions refused false true
add_bos_token refused false true
chat_template refused "x"
chat_template_kwargs@chat harmless {}
chat_template_kwargs@completions refused {"enable_thinking":false} {}
documents refused [{"text":"x"}] []
negative_prompt refused "x" ""
safe_prompt refused true false
image_data refused [{}] []
lora refused [{"id":0,"scale":0.5}] []
frequency_penalty refused 0.5 0 0.0
presence_penalty refused -0.5 0
repetition_penalty refused 1.1 1 1.0
repeat_penalty refused 1.1 1
rep_pen refused 1.1 1
encoder_repetition_penalty refused 1.1 1
penalize_nl refused true false
no_repeat_ngram_size refused 3 0
length_penalty refused 2 1.0
logit_bias refused {"5":-100} {} []
bad_words refused ["x"] []
banned_strings refused ["x"] []
custom_token_bans refused "5" "" []
allowed_token_ids refused [5] []
logits_processors refused ["x"] []
do_sample refused false true
best_of refused 2 1
num_beams refused 2 1
use_beam_search refused true false
early_stopping refused true false
penalty_alpha refused 0.5 0
guidance_scale refused 1.5 1
typical refused 0.5 1
typical_p refused 0.5 1
tfs refused 0.5 1
tfs_z refused 0.5 1
top_a refused 0.5 0
skew refused 0.5 0
nsigma refused 1.5 0
top_n_sigma refused 1.5 -1 0
epsilon_cutoff refused 3 0
eta_cutoff refused 3 0
min_keep refused 5 0
mirostat refused 2 0
mirostat_mode refused 2 0
dry_multiplier refused 0.8 0
xtc_probability refused 0.5 0
adaptive_target refused 0.5 -1
dynamic_temperature refused true false
dynatemp_range refused 0.5 0
smoothing_factor refused 0.5 0
temperature_last refused true false
watermarking refused true false
repetition_detection refused {"min_count":3} {}
samplers refused ["top_k"]
sampler_order refused [6,0]
sampler_priority refused ["top_k"]
grammar refused "root::=[a]+" ""
grammar_string refused "root::=[a]+" ""
guided_json refused {"type":"object"}
guided_regex refused "a+"
guided_choice refused ["a"]
guided_grammar refused "x"
guided_whitespace_pattern refused "x"
min_tokens refused 5 0
min_new_tokens refused 5 0
min_length refused 5 0
ban_eos_token refused true false
include_stop_str_in_output refused true false
t_max_predict_ms refused 5 0 -1
t_max_prompt_ms refused 5
n_indent refused 2 0
top_logprobs@completions refused 3 0
n_probs refused 3 0
post_sampling_probs refused true false
logprob_token_ids refused [5]
skip_special_tokens refused false true
return_token_ids refused true false
return_tokens refused true false
return_tokens_as_token_ids refused true false
return_prompt_text refused true false
return_progress refused true false
timings_per_token refused true false
response_fields refused ["content"] []
chat_format refused 1
chat_parser refused "x"
priority refused 1 0
cache_salt refused "secret"
kv_transfer_params refused {}
ec_transfer_params refused {}
vllm_xargs refused {"x":1} {}
extra_body refused {"top_k":4}
stream_otpions refused {"include_usage":true}
message refused []
user harmless "x"
safety_identifier harmless "x"
metadata harmless {"tags":["app:x"],"session_id":"x"}
request_id harmless "x"
session_id harmless "x"
service_tier harmless "flex"
api_type harmless "generic"
api_server harmless "http://127.0.0.1:5000"
legacy_api harmless false
cache_prompt harmless true
prompt_cache_key harmless "x"
prompt_cache_options harmless {}
prompt_cache_retention harmless "24h"
id_slot harmless -1
n_cache_reuse harmless 0
n_keep harmless 5
n_discard harmless 5
truncation_length harmless 8192
truncation_side harmless "left"
backend_sampling harmless false
stream_interval harmless 4
speculative.n_max harmless 16
speculative.n_min harmless 1
speculative.p_min harmless 0.75
speculative.type harmless "none"
speculative.ngram_size_n harmless 4
speculative.ngram_size_m harmless 4
speculative.ngram_m_hits harmless 1
speculative_ngram harmless true
parallel_tool_calls harmless false
parse_tool_calls refused false true
preserved_tokens harmless []
grammar_lazy harmless false
grammar_triggers harmless []
guided_decoding_backend harmless "outlines"
spaces_between_special_tokens harmless false
media_io_kwargs harmless {}
mm_processor_kwargs harmless {}
return_mm_kwargs harmless false
return_token_offsets harmless true
routed_experts_prompt_start harmless 0
mirostat_tau harmless 5
mirostat_eta harmless 0.1
dry_base harmless 1.75
dry_allowed_length harmless 2
dry_penalty_last_n harmless 64
dry_sequence_breakers harmless [":"]
xtc_threshold harmless 0.1
adaptive_decay harmless 0.9
dynatemp_low harmless 1
dynatemp_high harmless 1
dynatemp_exponent harmless 1
smoothing_curve harmless 1
repeat_last_n harmless 64
rep_pen_range harmless 1024
repetition_penalty_range harmless 1024
reasoning_budget_start_tag harmless "<t>"
reasoning_budget_end_tag harmless "</t>"
reasoning_budget_message harmless ""
reasoning_budget_arm_immediately harmless false
"""


class Kind(NamedTuple):
    kind: str
    asks: Any
    neutral: list[Any]


@cache
def kinds(is_chat: bool) -> dict[str, Kind]:
    """Of the names that clients send there."""
    path = "chat" if is_chat else "completions"
    known = {}
    for line in KINDS.strip().split("\n"):
        name, kind, *values = line.split(" ")
        asks, *neutral = map(json.loads, values)
        if name.partition("@")[2] in ("", path):
            null = [] if name in ("messages", "prompt") else [None]
            known[name.partition("@")[0]] = Kind(kind, asks, null + neutral)
    sent = " ".join(CHATS if is_chat else COMPLETIONS).split()
    return {name: known[name] for name in sorted({*sent})}


@cache
def quick() -> Model:
    return Model.load("tiny", "cpu", torch.float32)


@cache
def offer() -> Offer:
    return Offer(quick(), "tiny", 300, settings=Settings())


def told(is_chat: bool, **body) -> tuple:
    """All that is read of a body, but for seeds that are drawn."""
    asked = read(is_chat, offer(), **body)
    streams = []
    for request in (stream.request for stream in asked.streams):
        settings = request.settings
        seed = settings.seed if settings.seed in (-1, 5, 6) else None
        streams.append((request.tokens, request.eos_token_ids, replace(settings, seed=seed)))
    names = ("stream", "stream_options", "origins", "echo")
    return streams, asked.tools, asked.param, [getattr(asked.body, name) for name in names]


# ---- Each field alone


@pytest.mark.filterwarnings("ignore:a prompt spells")
@pytest.mark.parametrize("is_chat", [True, False])
def test_a_field_is_honoured_refused_by_name_or_harmless(is_chat):
    for name, (kind, asks, neutral) in kinds(is_chat).items():
        needs = {"top_logprobs": {"logprobs": True}, "origins": {"stream": True}}
        beside = needs.get(name, {})
        if name == "special" and not is_chat:
            beside = {"prompt": "<|endoftext|>"}
        plain = told(is_chat, **beside)
        for value in neutral:
            assert told(is_chat, **beside, **{name: value}) == plain, name
        if kind == "refused":
            zero = [0] if -1 in neutral and 0 not in neutral else []  # no budget at all, say
            for value in (asks, *zero):
                says = f"^{name} is (not done here: leave it out|.* it must be 'none' or 'auto')"
                with pytest.raises(HttpError, match=says) as error:
                    told(is_chat, **{name: value})
                assert (error.value.status, error.value.param) == (400, name)
        elif name != "model":
            changes = told(is_chat, **beside, **{name: asks}) != plain
            assert changes == (kind == "honoured"), name


@pytest.mark.parametrize("is_chat", [True, False])
def test_a_client_may_send_all_that_it_knows(is_chat):
    """As SillyTavern does, with everything switched off."""
    known = kinds(is_chat).items()
    body = {name: field.neutral[-1] for name, field in known if field.neutral}
    body |= {name: field.asks for name, field in known if field.kind == "harmless"}
    assert len(body) > 100 and told(is_chat, **body) == told(is_chat)


def test_the_lists_hold_nothing_else():
    """Nor in two of them, but for a field of one path; what is left is of objects in a body."""
    sent = kinds(True).keys() | kinds(False).keys()
    honoured = {*fields.ChatBody.model_fields, *fields.TextBody.model_fields, *fields.Body.others}
    honoured |= fields.ALIASES.keys()
    neutral, harmless = fields.NEUTRAL.keys(), fields.HARMLESS
    assert honoured <= sent and neutral | harmless <= sent | set(INSIDE.split())
    of_one_path = {"top_logprobs", "add_special_tokens", "special", "echo", "chat_template_kwargs"}
    of_one_path |= {"tools", "tool_choice", "reasoning_effort"}
    assert honoured & neutral == of_one_path
    assert not harmless & (honoured | neutral)


SCHEMA = {"type": "array", "items": {"type": "boolean"}}
INNER = {"name": "it", "description": "x", "strict": False, "schema": SCHEMA}


def test_a_schema_is_read_wherever_clients_put_it():
    wrapped = {"type": "json_schema", "json_schema": INNER}
    for body in (
        {"response_format": wrapped},
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        {"response_format": {"type": "json_schema", "schema": SCHEMA}},
        {"response_format": wrapped | {"schema": None}},
        {"response_format": {"type": "text"}, "json_schema": SCHEMA},
        {"response_format": {"type": "json_object"}, "json_schema": INNER},
        {"json_schema": json.dumps(SCHEMA)},
        {"json_schema": INNER},
        {"structured_outputs": {"json": SCHEMA, "regex": None, "disable_any_whitespace": True}},
    ):
        for is_chat in (True, False):
            (stream,) = read(is_chat, offer(), **body).streams
            assert json.loads(stream.request.settings.schema) == SCHEMA, body


OBJECTS = table(
    """
    response_format {"type": "json_object", "strict": true} → response_format.strict is not done
    response_format {"schema": {}} → response_format.schema is not done here
    response_format {"type": "text", "json_schema": {"schema": {}}} → response_format.json_schema is
    response_format {"type": "json_schema"} → response_format must have a schema
    response_format {"type": "json_schema", "json_schema": {"type": "object"}} → json_schema.type
    response_format {"type": "json_schema", "json_schema": {"name": "x"}} → must have a schema
    response_format {"type": "json_schema", "schema": {}, "json_schema": {"schema": {}}} → are given
    response_format {"type": "structural_tag"} → response_format.type is 'structural_tag'
    response_format {"type": "json_object", "schema": [1]} → response_format.schema: schema is [1]
    json_schema 3 → json_schema: schema is 3: it must be a JSON object
    json_schema {"schema": {}, "value": {}} → json_schema.value is not done here
    structured_outputs {"json": {}, "choice": ["a"]} → structured_outputs.choice are given
    structured_outputs {"json_object": true, "json": {}} → structured_outputs.json are given
    structured_outputs {"whitespace_pattern": " "} → structured_outputs.whitespace_pattern
    stream_options {"include_usages": true} → leave it out (did you mean include_usage?)
    max_tokens 6000.5 → max_tokens is 6000.5
    max_completion_tokens "3" → max_completion_tokens is '3'
    prompt "a" → prompt is not done here: leave it out
    asked {"json_schema": {}, "structured_outputs": {"regex": "a"}} → json_schema and structured
    asked {"stopping_strings": ["a"], "stop": ["b"]} → stopping_strings and stop are one field
    asked {"max_tokens": 3, "max_new_tokens": 3, "n_predict": 4} → n_predict and max_tokens are one
    message {"name": "Tom"} → messages[0].name is not done here
    message {"prefix": true} → messages[0].prefix is not done here
    message {"role": "assistant", "reasoning_content": "b"} → messages[0].reasoning_content is
    message {"content": [{"type": "text", "text": "a", "detail": 1}]} → content[0].detail
    message {"content": null} → messages[0].content is missing
    """
)


def test_an_object_in_a_body_has_a_closed_list():
    for given, says in OBJECTS:
        name, text = given.split(" ", 1)
        match name, json.loads(text):
            case "asked", body:
                pass
            case "message", message:
                body = {"messages": [{"role": "user", "content": "a"} | message]}
            case _, value:
                body = {name: value}
        with pytest.raises((HttpError, UserError), match=re.escape(says)):
            read(True, offer(), **body)
    with pytest.raises(HttpError, match="^messages is not done here"):
        read(False, offer(), messages=[])


def test_what_other_clients_add_to_a_message_is_read_as_the_message():
    labels = {"id": 7, "opts": {"visible": False}, "tool_calls": [], "refusal": None, "name": ""}
    labels |= {"type": "text", "metadata": {"_db_id": "7c"}}
    part = {"type": "text", "text": PROMPT, "cache_control": {"type": "ephemeral"}}
    reply = {"role": "assistant", "content": None, "reasoning_content": "\n"}
    plain = [{"role": "user", "content": PROMPT}, {"role": "assistant", "content": ""}]
    assert told(True, messages=[{"role": "user", "content": [part]} | labels, reply]) == told(
        True, messages=plain
    )


# ---- Many at random

LIMIT = 12  # tokens of a text
ODD = [True, -1, 0, 1, 3.0, 2.5, 10**30, 1e300, "", "x", "\ud800", [], ["a"], [[1]], {}, {"a": 1}]
CONSTRAINTS = {"response_format", "json_schema", "structured_outputs"}
SAMPLING = {"temperature", "top_k", "top_p", "min_p"}


class Case(NamedTuple):
    """A body at random."""

    is_chat: bool
    body: dict[str, Any]
    refused: set[str]  # fields that must be refused: one of them is named
    suspect: set[str]  # fields that may be


def is_refused(value: Any, known: Kind) -> bool:
    """Where false, 0, or an empty list asks for nothing, the others of these do, too."""
    may_be_off = any(not value for value in known.neutral[1:]) and -1 not in known.neutral
    return known.kind == "refused" and value not in known.neutral and bool(value or not may_be_off)


def draw_case(draw: random.Random) -> Case:
    is_chat = draw.random() < 0.5
    known = kinds(is_chat)
    honoured = [name for name, field in known.items() if field.kind == "honoured"]
    if not HAS_GRAMMARS:
        honoured = [name for name in honoured if name not in CONSTRAINTS]
    chosen = draw.sample(honoured, draw.randrange(5))
    chosen += draw.sample(sorted(known.keys() - CONSTRAINTS), draw.choice([0, 0, 1, 2]))
    body: dict[str, Any] = {}
    suspect = set()
    for name in chosen:
        values = draw.choice([[known[name].asks], known[name].neutral or ODD, ODD])
        body[name] = draw.choice(values)
        if values is ODD or name in fields.ALIASES or name == "top_logprobs":
            suspect |= {name, fields.ALIASES.get(name, name)}
    if len(CONSTRAINTS & body.keys()) > 1:
        suspect |= CONSTRAINTS
    if body.get("stream") is not True:
        suspect.add("origins")
    refused = {name for name, value in body.items() if is_refused(value, known[name])}
    plain: dict[str, Any] = {"temperature": 0}
    if is_chat:
        plain["messages"] = [{"role": "user", "content": PROMPT}]
    else:
        plain["prompt"] = PROMPT
    return Case(is_chat, plain | body, refused=refused, suspect=suspect)


@cache
def text_of(prompt: str, settings: str) -> str:
    """What `generate` makes of JSON settings."""
    return generate(prompt, quick(), max_len=LIMIT, chat=False, **json.loads(settings)).text


def wanted(case: Case, i: int) -> str | None:
    """The text of choice i. None: it is not known."""
    body = fields.without_aliases(case.body)
    prompt = body["messages"][0]["content"] if case.is_chat else body["prompt"]
    seed = body.get("seed", -1)
    is_free = body.get("temperature", 1) > 0 and seed == -1
    if is_free or not isinstance(prompt, str) or body.keys() & {"stop_token_ids", "ignore_eos"}:
        return None
    settings = {name: body[name] for name in SAMPLING & body.keys()}
    settings["top_k"] = max(0, body.get("top_k", 0))
    settings["seed"] = int(seed) + i
    settings["stop"] = body.get("stop", [])
    most = LIMIT - len(quick().encode(prompt))
    asked = body.get("max_completion_tokens", body.get("max_tokens", most))
    settings["max_tokens"] = min(int(asked), most)
    for name, setting, value in (
        ("response_format", "schema", {"enum": [12]}),
        ("json_schema", "schema", {"const": 7}),
        ("structured_outputs", "choice", ["ab", "cd"]),
    ):
        if body.get(name) == kinds(case.is_chat)[name].asks:
            settings[setting] = value
        elif name in case.suspect and name in body:
            return None
    echoed = prompt if body.get("echo") and not case.is_chat else ""
    return echoed + text_of(prompt, json.dumps(settings, sort_keys=True))


def whole(text: str) -> dict[str, Any]:
    """The answer; of a stream, its chunks as one."""
    if not text.startswith("data: "):
        return json.loads(text)
    answer: dict[str, Any] = {"choices": {}}
    for event in text.split("\n\n")[:-2]:
        chunk = json.loads(event[6:])
        answer |= {"usage": chunk["usage"]} if "usage" in chunk else {}
        for choice in chunk["choices"]:
            told = answer["choices"].setdefault(choice["index"], {"text": "", "logprobs": []})
            told["text"] += choice.get("text", choice.get("delta", {}).get("content", ""))
            told["logprobs"].append(choice["logprobs"])
            told["finish_reason"] = choice["finish_reason"]
    answer["choices"] = [*answer["choices"].values()]
    return answer


def fault(case: Case, status: int, text: str) -> str:
    """What is wrong with an answer; empty: it is what was asked for, or names a field."""
    if status != 200:
        error = json.loads(text)["error"]
        words = {error["param"] or "", *re.findall(r"\w+", error["message"])}
        is_named = not words.isdisjoint(case.refused | case.suspect)
        return "" if status in (400, 404) and is_named else f"{status} {error}"
    if case.refused:
        return f"{case.refused} are accepted"
    body = fields.without_aliases(case.body)
    answer = whole(text)
    choices = answer["choices"]
    n = int(body.get("n", 1))
    if len(choices) != n:
        return f"{len(choices)} choices"
    asks_usage = body.get("stream_options", {}).get("include_usage", False)
    if body.get("stream") and asks_usage != ("usage" in answer):
        return "usage in a stream"
    for i, choice in enumerate(choices):
        said = choice.get("text", choice.get("message", {}).get("content"))
        if wanted(case, i) not in (None, said):
            return f"{said!r} and not {wanted(case, i)!r}"
        has_logprobs = choice["logprobs"] not in (None, [None] * len(choice["logprobs"] or []))
        if said and has_logprobs != (body.get("logprobs", False) is not False):
            return f"logprobs {choice['logprobs']}"
    return ""


def test_requests_at_random_are_answered_as_asked_or_name_a_field():
    draw = random.Random(1)
    counts = Counter()

    async def scenario(app):
        for _ in range(100):
            case = draw_case(draw)
            status, text, _ = await ask(app, "POST", CHAT if case.is_chat else COMPLETE, case.body)
            assert not fault(case, status, text), (fault(case, status, text), case)
            counts[status] += 1

    for _ in range(TIMES):
        run(scenario, model=quick(), limit=LIMIT)
    assert counts[200] > 20 * TIMES and counts[400] > 20 * TIMES, counts
