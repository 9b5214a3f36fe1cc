"""OpenAI's protocol: what a client may ask for, and what it is answered.

`/v1/chat/completions` and `/v1/completions`, with fields that vLLM and llama.cpp have added (top_k,
min_p, ignore_eos, stop_token_ids, structured_outputs, json_schema, chat_template_kwargs). fields.py
has the closed list of fields, tools.py the functions that an answer may call, and answers.py reads
thoughts, content and calls from its text. `read_request` reads a body, and `Reply` writes the
answers: one object, or, streamed, a chunk for all that is new of a text, with the role in the first
and the finish_reason in the last.

`special`: a prompt means the control tokens that it spells (the default: they are text there).
`max_completion_tokens` wins over `max_tokens`. `stop_token_ids` may end a text amid its grammar:
then its finish_reason is `length`.
"""

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any
from uuid import uuid4

from app.answers import CallFormat, Thoughts
from app.asgi import HttpError
from app.conversation import read_conversation
from app.fields import Body, ChatBody, TextBody, read_body
from app.tools import NO_TOOLS, AnswerForm, Tools, call_format
from automaton import lark_of
from bounds import check_bounds
from errors import UserError, brief
from loading import Model
from request import OutputStream, Settings
from sampling import TokenLogprob
from serve import Update
from settings import Grammar, check_whole, settings_of

DEFAULT_MAX_TOKENS = 16  # of /v1/completions; a chat's answer takes what the context leaves
MAX_CHOICES = 128  # prompts · n
MAX_STOPS = 64
MAX_STOP_CHARACTERS = 1000
MAX_ECHOED = 2**20  # numbers and texts of all prompts that one answer repeats
LEAST_LOGPROB = -9999.0  # JSON has no −∞
FORMATS = {  # where response_format may have a schema -> in which of its types
    "response_format.schema": ("json_object", "json_schema"),
    "response_format.json_schema": ("json_schema",),
}
ANY_OBJECT = {"type": "object"}
# Whether to think, in the words of `thinking` and `reasoning_effort`.
THINKS = {"auto": None, "enabled": True, "disabled": False, "none": False}
OF_THE_SERVER = {"messages", "tools", "documents", "add_generation_prompt"}  # a template's values
Fields = dict[str, Any]  # a JSON object


# ---- Requests ----------------------------------------------------------------------------------


@dataclass
class Offer:
    """What a server offers: a model under a name, and the longest text."""

    model: Model
    name: str
    limit: int  # tokens of prompt and answer
    settings: Settings  # what the command line chose: γ

    @cached_property
    def call_format(self) -> CallFormat:
        return call_format_of(self.model)

    @cached_property
    def thoughts(self) -> Thoughts | None:
        """The tags of the model's thoughts; None: it has none."""
        template = self.model.tokenizer.template(False)
        return template and Thoughts.of(template.source)


def call_format_of(model: Model) -> CallFormat:
    """How the model writes calls."""
    template = model.tokenizer.template(True)
    if template is None:
        return CallFormat(problem=NO_TOOLS)
    return call_format(template.ask, model.tokenizer.specials)


@dataclass
class Asked:
    """What one client asks for."""

    body: ChatBody | TextBody
    streams: list[OutputStream]  # n of the first prompt, then n of the second, …
    form: AnswerForm
    follows: Grammar | None  # the grammar of all texts; None: they are free
    param: str  # the field that asks for the grammar


def read_request(data: bytes, is_chat: bool, offer: Offer) -> Asked:
    """Read a request's body, and check all but its grammar, which is compiled later. UserError
    for what is wrong, HttpError for another model."""
    body = read_body(data, ChatBody if is_chat else TextBody)
    if body.model not in (None, offer.name):
        shown = brief(repr(body.model), 100)
        message = f"there is no model {shown}: this server has {offer.name!r}"
        raise HttpError(404, message, param="model", code="model_not_found")
    tools = read_tools(body, offer) if is_chat else None
    prompts = read_chat(body, tools, offer) if is_chat else read_prompts(body, offer)
    check_whole("n", body.n, 1, MAX_CHOICES // len(prompts), f" ({len(prompts)} prompts)")
    asks, constraint = read_constraint(body)
    settings = replace(read_settings(body, offer), **constraint)
    tags = offer.thoughts if is_chat else None
    end = offer.model.tokenizer.decode(prompts[0][-20:], special=True)  # with control tokens
    form = AnswerForm(tags, end.rstrip(), tools)
    if tags is not None and body.reasoning_format == "none":
        raise UserError(
            "reasoning_format is 'none': thoughts are always separate; use auto", "reasoning_format"
        )
    settings = with_form(settings, asks, form)
    if body.echo:
        settings = replace(settings, prompt_logprobs=settings.logprobs)
        check_echo(body.n * sum(map(len, prompts)), settings.logprobs)
    ends = set() if body.ignore_eos else offer.model.eos_token_ids
    is_reply = is_chat and offer.model.uses_template(None)
    streams = []
    for tokens in prompts:
        first = offer.model.request_of(tokens, settings, offer.limit, is_reply)
        first.eos_token_ids = {*body.stop_token_ids, *ends}
        for request in [first, *map(first.sibling_text, range(1, body.n))]:
            stream = OutputStream(offer.model.tokenizer, request, "", index=len(streams))
            streams.append(stream)
    if body.origins and not body.stream:
        raise UserError(
            "origins are sent in chunks: set stream to true, or leave it out", "origins"
        )
    return Asked(body, streams, form, settings.follows, param=asks or "tools")


# ---- Prompts


def read_chat(body: ChatBody, tools: Tools | None, offer: Offer) -> list[list[int]]:
    """The tokens of a conversation. A model without a chat template goes on from its texts."""
    if not body.messages:
        raise UserError("messages must be a list of at least one message", "messages")
    conversation = read_conversation(body.messages, offer.call_format.one_call)
    how = template_options(body)
    declared = None
    if tools is not None:
        declared = [tool.as_sent() for tool in body.tools]
    most = offer.limit - 1
    if offer.model.uses_template(None):
        return [offer.model.tokenizer.chat(conversation, tools=declared, most=most, how=how)]
    text = "\n".join(message["content"] for message in conversation)
    return [offer.model.encode(text, most=most)]


def template_options(body: ChatBody) -> Fields:
    """What only a template reads: it has no effect where the template does not name it."""
    asked = (body.enable_thinking, THINKS[body.thinking.type], THINKS.get(body.reasoning_effort))
    options: Fields = {"enable_thinking": next((each for each in asked if each is not None), None)}
    if body.reasoning_effort != "auto":
        options["reasoning_effort"] = body.reasoning_effort
    options |= body.chat_template_kwargs
    for name, value in options.items():
        if name in OF_THE_SERVER or not re.fullmatch(r"[\w.-]{1,32}", str(value)):
            path = f"chat_template_kwargs.{brief(name, 100)}"
            raise UserError(f"{path} is not supported: leave it out", path)
    return options


def read_prompts(body: TextBody, offer: Offer) -> list[list[int]]:
    """The tokens of one prompt or several, each of them a text, or tokens."""
    if not body.add_special_tokens:
        raise UserError("add_special_tokens is not supported: leave it out", "add_special_tokens")
    is_one = not isinstance(body.prompt, list) or is_tokens(body.prompt)
    prompts = [body.prompt] if is_one else body.prompt
    if len(prompts) > MAX_CHOICES:
        raise UserError(f"{len(prompts)} prompts: at most {MAX_CHOICES} are read", "prompt")
    tokens = []
    for prompt in prompts:
        if isinstance(prompt, str):
            most = offer.limit - 1
            prompt = offer.model.encode(prompt, chat=False, special=body.special, most=most)
        elif not is_tokens(prompt):
            raise UserError("prompt must be a text, tokens, or a list of these", "prompt")
        tokens.append(prompt)
    return tokens


def is_tokens(prompt: Any) -> bool:
    return isinstance(prompt, list) and all(type(token) is int for token in prompt)


def check_echo(num_tokens: int, num_top: int | None) -> None:
    """Refuse an answer that costs memory and time for all out of proportion to what it took to
    make: each text of a prompt repeats it. num_tokens: of the prompts in all texts."""
    for_each = 1 if num_top is None else 2 + num_top  # its text; its logprob, and the most probable
    count = num_tokens * for_each
    if count > MAX_ECHOED:
        raise UserError(
            f"echo would return {count:,} numbers and strings of prompts: at most {MAX_ECHOED:,} "
            "are returned; lower n or logprobs",
            "echo",
        )


# ---- Tools


def read_tools(body: ChatBody, offer: Offer) -> Tools | None:
    """What the answer may call; None: nothing."""
    choice = body.tool_choice
    functions = [tool.function for tool in body.tools]
    if choice.type == "function":
        name = choice.function and choice.function.name
        functions = [function for function in functions if function.name == name]
    if choice.type not in ("none", "auto") and not functions:
        raise UserError(
            "tool_choice is not supported: leave it out, or give tools that it can choose",
            "tool_choice",
        )
    if choice.type == "none" or not functions:
        return None
    if offer.call_format.problem:
        raise UserError(f"tools is not supported: {offer.call_format.problem}", "tools")
    return Tools(
        functions,
        form=offer.call_format,
        must_call=choice.type != "auto",
        is_parallel=body.parallel_tool_calls and choice.type != "function",
    )


# ---- Settings


def read_settings(body: ChatBody | TextBody, offer: Offer) -> Settings:
    """UserError for a bad value. A −1 (top_k, seed, max_tokens) is vLLM's and llama.cpp's."""
    chosen = dict(body.model_extra)  # temperature and the like
    if chosen.get("top_k") == -1:  # all
        chosen["top_k"] = 0
    if chosen.get("seed") == -1:  # a new one
        del chosen["seed"]
    if body.repetition_penalty_range and chosen.get("repetition_penalty", 1) != 1:
        message = "repetition_penalty_range is not supported: leave it out, or set it to 0 (all)"
        raise UserError(message, "repetition_penalty_range")
    stops = body.stop if isinstance(body.stop, list) else [body.stop]
    if len(stops) > MAX_STOPS or sum(map(len, map(str, stops))) > MAX_STOP_CHARACTERS:
        raise UserError(
            f"stop may be at most {MAX_STOPS} texts, of {MAX_STOP_CHARACTERS} characters together",
            "stop",
        )
    chosen["stop"] = body.stop
    chosen["max_tokens"] = offer.limit if body.is_chat else DEFAULT_MAX_TOKENS
    for most in (body.max_tokens, body.max_completion_tokens):
        if most is not None:
            chosen["max_tokens"] = offer.limit if most == -1 else most
    chosen["logprobs"] = body.logprobs
    if body.is_chat:  # there logprobs is a switch, and top_logprobs the number
        if body.top_logprobs and not body.logprobs:
            raise UserError("top_logprobs needs logprobs: set it to true", "top_logprobs")
        chosen["logprobs"] = body.top_logprobs if body.logprobs else None
    return replace(offer.settings, **chosen)


def read_constraint(body: Body) -> tuple[str, Fields]:
    """The field that says what the text follows, and the setting that it becomes: schema, regex,
    choice or grammar. Both are empty if the text is free. UserError if fields ask for several, or
    if one cannot be read."""
    form = body.response_format
    outputs = body.structured_outputs
    schemas = {
        "json_schema": body.json_schema.value,
        "response_format.schema": form.value,
        "response_format.json_schema": form.json_schema.value,
    }
    for path, types in FORMATS.items():
        if schemas[path] is not None and form.type not in types:
            raise UserError(f"{path} is not supported: leave it out", path)
    asked = [(path, "schema", schema) for path, schema in schemas.items() if schema is not None]
    if form.type == "json_schema" and not asked:
        raise UserError("response_format must have a schema, in its json_schema", "response_format")
    if form.type == "json_object" and not asked:
        asked.append(("response_format", "schema", ANY_OBJECT))
    if outputs.json_object:
        asked.append(("structured_outputs.json_object", "schema", ANY_OBJECT))
    for name, value in outputs.model_extra.items():
        setting = "schema" if name == "json" else name
        asked.append((f"structured_outputs.{name}", setting, value))
    if not asked:
        return "", {}
    path, setting, value = asked[-1]
    if len(asked) > 1:
        paths = " and ".join(path for path, _, _ in asked)
        raise UserError(f"{paths} are given: an output can follow only one of them", path)
    try:
        Settings(**{setting: value})
    except UserError as error:
        raise UserError(f"{path}: {error}", path) from None
    return path, {setting: value}


def with_form(settings: Settings, param: str, form: AnswerForm) -> Settings:
    """The settings, with the grammar of a whole answer: its thoughts, and calls or what is asked
    for. param: the field that asks for it."""
    follows = settings.follows
    if form.tools is None and (form.tags is None or follows is None):
        return settings
    answer = None
    if follows is not None:
        try:
            check_bounds(follows)
            answer = lark_of(follows)
        except UserError as error:
            raise UserError(str(error), param) from None
    return settings_of({"grammar": form.grammar(answer)}, settings)


# ---- Answers -----------------------------------------------------------------------------------


class Reply:
    """Makes the objects that answer one request."""

    def __init__(self, asked: Asked, offer: Offer):
        self.asked = asked
        self.tokenizer = offer.model.tokenizer
        self.id = ("chatcmpl-" if asked.body.is_chat else "cmpl-") + uuid4().hex
        kind = "text_completion"
        if asked.body.is_chat:
            kind = "chat.completion.chunk" if asked.body.stream else "chat.completion"
        self.head = {
            "id": self.id,
            "object": kind,
            "created": int(time.time()),
            "model": offer.name,
        }
        # Of each text: the decoder of its tokens that have logprobs, and their characters so far.
        self.decoders = [
            self.tokenizer.incremental_decoder(not asked.body.echo) for _ in asked.streams
        ]
        self.offsets = [0] * len(asked.streams)
        self.num_tokens: dict[int, int] = {}  # of each text of which something was told
        self.readers = [asked.form.reader() for _ in asked.streams]

    def completion(self, updates: Sequence[Update]) -> Fields:
        """All texts at once."""
        choices = [self._choice(update) for update in updates]
        return self.head | {"choices": choices, "usage": self.usage()}

    def chunk(self, update: Update) -> Fields:
        """What is new in one text."""
        chunk = self.head | {"choices": [self._choice(update)]}
        if self.asked.body.origins:
            chunk["origins"] = update.pieces
        if self.asked.body.stream_options.continuous_usage_stats:
            chunk["usage"] = self.usage()
        return chunk

    def usage_chunk(self) -> Fields:
        """The last one, where it is asked for."""
        return self.head | {"choices": [], "usage": self.usage()}

    def usage(self) -> Fields:
        """Tokens. Texts of one prompt share it."""
        requests = [stream.request for stream in self.asked.streams]
        first = [request for request in requests if request.sibling is None]
        num_prompt_tokens = sum(request.num_prompt_tokens for request in first)
        num_cached = sum(request.num_cached_tokens for request in first)
        num_tokens = sum(self.num_tokens.values())
        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_tokens,
            "total_tokens": num_prompt_tokens + num_tokens,
            "prompt_tokens_details": {"cached_tokens": num_cached},
        }

    def _choice(self, update: Update) -> Fields:
        """What is new in one text, and why it has ended. UserError if that is an error."""
        i = update.index
        text = "".join(piece for piece, _ in update.pieces)
        if self.asked.body.is_chat:
            choice = self._message(i, text, update.result is not None)
            logprobs = self._chat_logprobs(update.logprobs)
        else:
            choice = {"text": self._echo(i) + text}
            logprobs = self._text_logprobs(i, update.logprobs)
        self.num_tokens[i] = update.num_tokens
        reason = None
        if update.result is not None:
            if update.result.error:
                raise UserError(update.result.error, self.asked.param)
            reason = update.result.finish_reason
            if reason == "stop" and self.readers[i].has_called:
                reason = "tool_calls"
        return choice | {"index": i, "logprobs": logprobs, "finish_reason": reason}

    def _echo(self, index: int) -> str:
        """The prompt, if it is asked for, and nothing of the text was told yet."""
        if not self.asked.body.echo or index in self.num_tokens:
            return ""
        return self.tokenizer.decode(self.asked.streams[index].result.prompt_tokens)

    def _message(self, index: int, text: str, is_last: bool) -> Fields:
        """The next piece of a chat's text, as a message: its content, thoughts, and calls."""
        is_streamed = self.asked.body.stream
        message = self.readers[index].feed(text, is_last)
        for call in message.get("tool_calls", ()):
            message["content"] = message["content"] or None
            if not is_streamed:
                del call["index"]
        if index not in self.num_tokens:
            message = {"role": "assistant"} | message
        elif not message["content"]:
            del message["content"]
        return {"delta" if is_streamed else "message": message}

    # ---- Log-probabilities

    def _chat_logprobs(self, entries: Sequence[TokenLogprob]) -> Fields | None:
        """Those of a chat's new tokens; None if there are none."""
        content = []
        for entry in entries:
            top = [self._token_fields(*pair) for pair in entry.top]
            fields = self._token_fields(entry.token, entry.logprob)
            content.append(fields | {"top_logprobs": top})
        return {"content": content} if content else None

    def _text_logprobs(self, index: int, entries: Sequence[TokenLogprob]) -> Fields | None:
        """Those of a completion's new tokens, and first of its prompt's, if asked for; None if
        there are none."""
        rows: list[tuple[int, float | None, Fields | None]] = []
        request = self.asked.streams[index].request
        if request.settings.prompt_logprobs is not None and index not in self.num_tokens:
            rows.append((request.tokens[0], None, None))  # nothing comes before it
            entries = [*request.prompt_logprobs, *entries]
        for entry in entries:
            top = {self._token_text(token): finite(logprob) for token, logprob in entry.top}
            rows.append((entry.token, finite(entry.logprob), top))
        if not rows:
            return None
        tokens, logprobs, tops = zip(*rows)
        return {
            "tokens": [self._token_text(token) for token in tokens],
            "token_logprobs": logprobs,
            "top_logprobs": tops,
            "text_offset": [self._offset(index, token) for token in tokens],
        }

    def _offset(self, index: int, token: int) -> int:
        """Where the next token begins among the characters of those before it."""
        offset = self.offsets[index]
        self.offsets[index] += len(self.decoders[index].feed(token))
        return offset

    def _token_fields(self, token: int, logprob: float) -> Fields:
        data = self.tokenizer.token_bytes(token, special=True)
        return {"token": self._token_text(token), "logprob": finite(logprob), "bytes": list(data)}

    def _token_text(self, token: int) -> str:
        return self.tokenizer.token_bytes(token, special=True).decode(errors="replace")


def finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)


def model_card(offer: Offer) -> Fields:
    """The model, as /v1/models tells it."""
    return {
        "id": offer.name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "llama",
        "root": offer.name,
        "max_model_len": offer.limit,
    }
