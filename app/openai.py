"""OpenAI's protocol: what a client may ask for, and what it is answered.

`/v1/chat/completions` and `/v1/completions`, with fields that vLLM and llama.cpp have added (top_k,
min_p, ignore_eos, stop_token_ids, structured_outputs, json_schema, chat_template_kwargs). fields.py
has the closed list of fields, and tools.py the functions that an answer may call. `read_request`
reads a body, and `Reply` writes the answers: one object, or, streamed, a chunk for all that is new
of a text, with the role in the first and the finish_reason in the last.

`special`: a prompt means the control tokens that it spells (the default: they are text there).
`max_completion_tokens` wins over `max_tokens`. `stop_token_ids` may end a text amid its grammar:
then its finish_reason is `length`.
"""

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any
from uuid import uuid4

from app.asgi import HttpError
from app.fields import (
    CHAT,
    COMPLETION,
    MESSAGE,
    MESSAGE_WITH_TOOLS,
    Body,
    check_listed,
    without_aliases,
)
from app.tools import (
    FUNCTION_NAME,
    CallFormat,
    CallReader,
    Function,
    Tools,
    call_format,
    call_grammar,
)
from checkpoint.files import parse_json
from errors import TooManyTokens, UserError, brief
from loading import Model
from request import Message, OutputStream, Result, Settings
from sampling import TokenLogprob
from serve import Update
from settings import MAX_LOGPROBS, SETTINGS, Grammar, check_whole, refuse_value

DEFAULT_MAX_TOKENS = 16  # of /v1/completions; a chat's answer takes what the context leaves
MAX_CHOICES = 128  # prompts · n
MAX_STOPS = 64
MAX_STOP_CHARACTERS = 1000
MAX_ECHOED = 2**20  # numbers and texts of all prompts that one answer repeats
LEAST_LOGPROB = -9999.0  # JSON has no −∞
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
SAMPLING = (*SETTINGS, "seed")
CONSTRAINTS = {"json": "schema", "regex": "regex", "choice": "choice", "grammar": "grammar"}
JSON_SCHEMA = ("name", "description", "strict", "schema")
FORMATS = {  # of an answer -> the fields that describe it
    "text": ("type",),
    "json_object": ("type", "schema"),
    "json_schema": ("type", "schema", "json_schema"),
}
ANY_OBJECT = {"type": "object"}
# Of each object that holds a function: its fields, and those of the function.
TOOL = ("type", "function"), ("name", "description", "parameters", "strict")
TOOL_CHOICE = ("type", "function"), ("name",)
TOOL_CALL = ("id", "index", "type", "function"), ("name", "arguments", "parsed_arguments")
NO_PARAMETERS = {"properties": {}, "additionalProperties": False}


# ---- Requests ----------------------------------------------------------------------------------


@dataclass
class Offer:
    """What a server offers: a model under a name, and the longest text."""

    model: Model
    name: str
    limit: int  # tokens of prompt and answer
    settings: Settings  # what the command line chose: γ

    @property
    def call_format(self) -> CallFormat | None:
        """How the model writes calls; None: it was not trained to, or they are not read here."""
        return call_format(self.model.tokenizer.tool_template or "")

    @cached_property
    def longest_token(self) -> int:
        """Bytes of the vocabulary's longest token."""
        tokenizer = self.model.tokenizer
        sizes = (len(tokenizer.token_bytes(id, special=True)) for id in range(tokenizer.vocab_size))
        return max(sizes)


@dataclass
class Asked:
    """What one client asks for."""

    is_chat: bool
    streams: list[OutputStream]  # n of the first prompt, then n of the second, …
    tools: Tools | None
    is_streamed: bool
    include_usage: bool  # in a last chunk
    continuous_usage: bool  # in every chunk
    shows_origins: bool
    echo: bool  # a text begins with its prompt
    param: str  # the field that asks for the grammar

    @property
    def follows(self) -> Grammar | None:
        """The grammar of all texts; None: they are free."""
        return self.streams[0].request.settings.follows


def bad(param: str, message: str) -> HttpError:
    """The error of a field."""
    return HttpError(400, message, param=param)


def read_request(data: bytes, is_chat: bool, offer: Offer) -> Asked:
    """Read a request's body, and check all but its grammar, which is compiled later. HttpError or
    UserError for what is wrong."""
    body = read_object(data)
    check_listed(body, CHAT if is_chat else COMPLETION)
    name = body.get("model", offer.name)
    if name != offer.name:
        message = f"there is no model {brief(repr(name), 100)}: this server has {offer.name!r}"
        raise HttpError(404, message, param="model", code="model_not_found")
    tools = read_tools(body, offer) if is_chat else None
    prompts = read_chat(body, tools, offer) if is_chat else read_prompts(body, offer)
    n = body.get("n", 1)
    check_whole("n", n, 1, MAX_CHOICES // len(prompts), f" ({len(prompts)} prompts)")
    settings = read_settings(body, is_chat, tools, offer)
    echo = not is_chat and typed(body, "echo", bool, False)
    if echo:
        settings = replace(settings, prompt_logprobs=settings.logprobs)
        check_echo(n * sum(map(len, prompts)), settings.logprobs)
    is_reply = is_chat and offer.model.uses_template(None)
    streams = []
    for tokens in prompts:
        first = offer.model.request_of(tokens, settings, offer.limit, is_reply)
        first.eos_token_ids = read_ends(body, offer)
        for request in [first, *map(first.sibling_text, range(1, n))]:
            stream = OutputStream(offer.model.tokenizer, request, "", index=len(streams))
            streams.append(stream)
    is_streamed = typed(body, "stream", bool, False)
    shows_origins = typed(body, "origins", bool, False)
    if shows_origins and not is_streamed:
        raise bad("origins", "origins is told in chunks: set stream to true, or leave it out")
    options = typed(body, "stream_options", dict, {})
    check_listed(options, ("include_usage", "continuous_usage_stats"), "stream_options.")
    return Asked(
        is_chat,
        streams,
        tools,
        is_streamed=is_streamed,
        include_usage=typed(options, "include_usage", bool, False),
        continuous_usage=typed(options, "continuous_usage_stats", bool, False),
        shows_origins=shows_origins,
        echo=echo,
        param=next(iter(read_schemas(body)), "structured_outputs" if tools is None else "tools"),
    )


def read_object(data: bytes) -> Body:
    """The JSON object of a body, without nulls and aliases. 100.0 is 100: to some clients all
    numbers are fractions."""
    try:
        body = parse_json(data.decode())
    except (ValueError, RecursionError) as error:
        raise HttpError(400, f"the body is not JSON: {brief(error, 200)}") from None
    if not isinstance(body, dict):
        raise HttpError(400, "the body is not a JSON object")
    return without_aliases({name: as_whole(value) for name, value in body.items()})


def as_whole(value: Any) -> Any:
    is_whole = isinstance(value, float) and value.is_integer() and abs(value) <= 2**53
    return int(value) if is_whole else value


def typed(fields: Body, name: str, kind: type, default: Any) -> Any:
    """A field's value. UserError if it is of another type."""
    value = fields.get(name)
    if value is None:
        return default
    if not isinstance(value, kind):
        refuse_value(name, value, f"of type {kind.__name__}")
    return value


def read_ends(body: Body, offer: Offer) -> set[int]:
    """The tokens that end a text."""
    ends = body.get("stop_token_ids", [])
    if not is_tokens(ends):
        raise bad("stop_token_ids", "stop_token_ids must be a list of tokens")
    if typed(body, "ignore_eos", bool, False):
        return set(ends)
    return {*ends, *offer.model.eos_token_ids}


# ---- Prompts


def read_chat(body: Body, tools: Tools | None, offer: Offer) -> list[list[int]]:
    """The tokens of a conversation. A model without a chat template goes on from its texts."""
    messages = typed(body, "messages", list, [])
    if not messages:
        raise bad("messages", "messages must be a list of one message or more")
    may_call = offer.call_format is not None
    conversation = [chat_message(f"messages[{n}]", one, may_call) for n, one in enumerate(messages)]
    declared = None if tools is None else [function.tool for function in tools.declared]
    check_characters(conversation, offer)
    thinking = read_thinking(body, offer.model.tokenizer.template(declared))
    most = offer.limit - 1
    with too_many_refused("messages", offer):
        if offer.model.uses_template(None):
            tokens = offer.model.tokenizer.chat(
                conversation, enable_thinking=thinking, tools=declared, most=most
            )
        else:
            text = "\n".join(message["content"] for message in conversation)
            tokens = offer.model.encode(text, thinking=thinking, most=most)
    check_length("messages", tokens, offer)
    return [tokens]


def read_thinking(body: Body, template: str | None) -> bool | None:
    """What the chat template is to get as enable_thinking. A reasoning_effort of none asks not to
    think, where the template has the choice."""
    values = typed(body, "chat_template_kwargs", dict, {})
    check_listed(values, ("enable_thinking",), "chat_template_kwargs.")
    has_choice = "enable_thinking" in (template or "")
    default = False if has_choice and body.get("reasoning_effort") == "none" else None
    return typed(values, "enable_thinking", bool, default)


def chat_message(where: str, message: Any, may_call: bool) -> Message:
    """A message with one text, as chat templates want it. may_call: the model's template has
    tools."""
    roles = ROLES | {"tool": "tool"} if may_call else ROLES
    if not isinstance(message, dict) or str(message.get("role")) not in roles:
        raise bad(where, f"{where} must have a role: {', '.join(roles)}")
    role = roles[message["role"]]
    allowed = MESSAGE_WITH_TOOLS.get(role, MESSAGE) if may_call else MESSAGE
    check_listed(message, allowed, f"{where}.")
    content = message.get("content")
    if content is None and role == "assistant":
        content = ""
    read: Message = {"role": role, "content": joined_text(where, content)}
    if role == "tool":
        read |= {name: typed(message, name, str, "") for name in ("tool_call_id", "name")}
    calls = typed(message, "tool_calls", list, [])
    if calls:
        path = f"{where}.tool_calls"
        read["tool_calls"] = [past_call(f"{path}[{n}]", call) for n, call in enumerate(calls)]
    return read


def joined_text(where: str, content: Any) -> str:
    """A message's content, which is a text, or a list of its parts."""
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    text = ""
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            shown = brief(repr(kind), 100)
            raise bad(where, f"{where} has a content of type {shown}: only text is read here")
        check_listed(part, ("type", "text"), f"{where}.content.")
        if not isinstance(part.get("text"), str):
            refuse_value(f"{where}.content", part.get("text"), "a text")
        text += part["text"]
    return text


def past_call(where: str, call: Any) -> Body:
    """A call of an earlier answer, as chat templates want it: its arguments are an object, not the
    text of one."""
    function = read_function(where, call, TOOL_CALL)
    text = typed(function, "arguments", str, "") or "{}"
    try:
        arguments = parse_json(text)
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        refuse_value(f"{where}.function.arguments", text, "the text of a JSON object")
    called = {"name": function["name"], "arguments": arguments}
    return {"id": typed(call, "id", str, ""), "type": "function", "function": called}


def read_prompts(body: Body, offer: Offer) -> list[list[int]]:
    """The tokens of one prompt or several, each of them a text, or tokens."""
    if not typed(body, "add_special_tokens", bool, True):
        raise bad("add_special_tokens", "add_special_tokens is not done here: leave it out")
    given = body.get("prompt")
    is_one = not isinstance(given, list) or is_tokens(given)
    prompts = [given] if is_one else given
    if len(prompts) > MAX_CHOICES:
        raise bad("prompt", f"{len(prompts)} prompts: at most {MAX_CHOICES} are read")
    special = typed(body, "special", bool, False)
    tokens = []
    for prompt in prompts:
        if isinstance(prompt, str):
            most = offer.limit - 1
            with too_many_refused("prompt", offer):
                prompt = offer.model.encode(prompt, chat=False, special=special, most=most)
        elif not is_tokens(prompt):
            raise bad("prompt", "prompt must be a text, tokens, or a list of these")
        check_length("prompt", prompt, offer)
        tokens.append(prompt)
    return tokens


def is_tokens(prompt: Any) -> bool:
    return isinstance(prompt, list) and all(type(token) is int for token in prompt)


def check_characters(conversation: Sequence[Message], offer: Offer) -> None:
    """Refuse what cannot fit before the template lays it out: each token would have to be the
    longest one. Not counted is what templates leave out: the reasoning of earlier answers, and
    spaces at both ends of a message."""
    counted = (message for message in conversation if message["role"] != "assistant")
    size = sum(len(message["content"].strip()) for message in counted)
    if size >= offer.longest_token * offer.limit:
        raise too_long("messages", f"{size:,} characters", offer)


@contextmanager
def too_many_refused(param: str, offer: Offer) -> Iterator[None]:
    """Refuse a text of which the tokenizer has read as much as fits, and more is left."""
    try:
        yield
    except TooManyTokens:
        raise too_long(param, f"at least {offer.limit:,} tokens", offer) from None


def check_length(param: str, tokens: list[int], offer: Offer) -> None:
    if len(tokens) >= offer.limit:
        raise too_long(param, f"{len(tokens):,} tokens", offer)
    vocab_size = offer.model.tokenizer.vocab_size
    if not tokens or not 0 <= min(tokens) <= max(tokens) < vocab_size:
        raise bad(param, f"{param} must have a token, and tokens are from 0 to {vocab_size - 1}")


def check_echo(num_tokens: int, num_top: int | None) -> None:
    """Refuse an answer that costs memory and time for all out of proportion to what it took to
    make: each text of a prompt repeats it. num_tokens: of the prompts in all texts."""
    for_each = 1 if num_top is None else 2 + num_top  # its text; its logprob, and the most probable
    count = num_tokens * for_each
    if count > MAX_ECHOED:
        raise bad(
            "echo",
            f"echo would tell {count:,} numbers and texts of prompts: at most {MAX_ECHOED:,} are "
            "told; lower n or logprobs",
        )


def too_long(param: str, size: str, offer: Offer) -> HttpError:
    message = f"{param}: {size}, but prompt and answer have at most {offer.limit:,} tokens"
    return HttpError(400, message, param=param, code="context_length_exceeded")


# ---- Tools


def read_tools(body: Body, offer: Offer) -> Tools | None:
    """What the answer may call; None: nothing."""
    tools = typed(body, "tools", list, [])
    functions = [read_tool(f"tools[{n}]", tool) for n, tool in enumerate(tools)]
    choice = body.get("tool_choice", "auto")
    chosen = functions
    if isinstance(choice, dict):
        name = read_function("tool_choice", choice, TOOL_CHOICE)["name"]
        chosen = [function for function in functions if function.name == name]
    elif choice not in ("none", "auto", "required"):
        refuse_value("tool_choice", choice, "none, auto, required or a function")
    if choice not in ("none", "auto") and not chosen:
        raise bad(
            "tool_choice",
            "tool_choice is not done here: leave it out, or give tools that it can choose",
        )
    is_parallel = typed(body, "parallel_tool_calls", bool, True)
    if choice == "none" or not functions:
        return None
    if offer.call_format is None:
        raise bad(
            "tools",
            "tools is not done here: leave it out, or serve a model whose chat template has tools",
        )
    return Tools(
        functions,
        chosen,
        form=offer.call_format,
        must_call=choice != "auto",
        is_parallel=is_parallel and not isinstance(choice, dict),
    )


def read_tool(where: str, tool: Any) -> Function:
    """A function that is declared."""
    function = read_function(where, tool, TOOL)
    schema = typed(function, "parameters", dict, NO_PARAMETERS)
    if schema.get("type", "object") != "object":
        path = f"{where}.function.parameters"
        raise bad(path, f"{path} is of another type than object: arguments have names")
    return Function(
        function["name"],
        {"type": "object"} | schema,
        is_strict=typed(function, "strict", bool, False),
        description=typed(function, "description", str, ""),
    )


def read_function(where: str, given: Any, fields: tuple[Sequence[str], Sequence[str]]) -> Body:
    """The function in a tool, a call or a choice. fields: TOOL, TOOL_CALL or TOOL_CHOICE."""
    if not isinstance(given, dict) or given.get("type") != "function":
        raise bad(where, f"{where} must be an object of type function")
    outer, inner = fields
    check_listed(given, outer, f"{where}.")
    function = typed(given, "function", dict, {})
    check_listed(function, inner, f"{where}.function.")
    name = typed(function, "name", str, "")
    if not re.fullmatch(FUNCTION_NAME, name):
        refuse_value(f"{where}.function.name", name, "1 to 64 letters, digits, _ and -")
    return function


# ---- Settings


def read_settings(body: Body, is_chat: bool, tools: Tools | None, offer: Offer) -> Settings:
    """UserError or HttpError for a bad value. A top_k or seed of −1 is vLLM's and llama.cpp's."""
    chosen: Body = {name: body[name] for name in SAMPLING if name in body}
    if chosen.get("top_k") == -1:  # all
        chosen["top_k"] = 0
    if chosen.get("seed") == -1:  # a new one
        del chosen["seed"]
    stop = body.get("stop", [])
    stops = [stop] if isinstance(stop, str) else typed(body, "stop", list, [])
    if len(stops) > MAX_STOPS or sum(map(len, map(str, stops))) > MAX_STOP_CHARACTERS:
        raise bad(
            "stop",
            f"stop may be at most {MAX_STOPS} texts, of {MAX_STOP_CHARACTERS} characters together",
        )
    chosen["stop"] = stops
    chosen["max_tokens"] = offer.limit if is_chat else DEFAULT_MAX_TOKENS
    for name in ("max_tokens", "max_completion_tokens"):
        if name in body:
            check_whole(name, body[name], 0, None)
            chosen["max_tokens"] = body[name]
    chosen["logprobs"] = body.get("logprobs")
    if is_chat:  # there logprobs is a switch, and top_logprobs the number
        num_top = body.get("top_logprobs", 0)
        check_whole("top_logprobs", num_top, 0, MAX_LOGPROBS)
        is_wanted = typed(body, "logprobs", bool, False)
        if num_top and not is_wanted:
            raise bad("top_logprobs", "top_logprobs needs logprobs: set it to true")
        chosen["logprobs"] = num_top if is_wanted else None
    return replace(offer.settings, **chosen, **read_constraint(body, tools))


def read_constraint(body: Body, tools: Tools | None = None) -> Body:
    """What the text follows, as a setting: schema, regex, choice or grammar. HttpError or UserError
    if fields ask for several, or if one cannot be read."""
    asked = [(path, "schema", schema) for path, schema in read_schemas(body).items()]
    outputs = typed(body, "structured_outputs", dict, {})
    check_listed(outputs, (*CONSTRAINTS, "json_object"), "structured_outputs.")
    if typed(outputs, "json_object", bool, False):
        asked.append(("structured_outputs.json_object", "schema", ANY_OBJECT))
    for name, setting in CONSTRAINTS.items():
        if outputs.get(name) is not None:
            asked.append((f"structured_outputs.{name}", setting, outputs[name]))
    if tools is not None:
        asked.append(("tools", "grammar", call_grammar(tools)))
    if len(asked) > 1:
        paths = [path for path, _, _ in asked]
        raise bad(paths[-1], f"{' and '.join(paths)} are given: a text follows one of them")
    for path, setting, value in asked:
        try:
            Settings(**{setting: value})
        except UserError as error:
            raise bad(path, f"{path}: {error}") from None
    return {setting: value for _, setting, value in asked}


def read_schemas(body: Body) -> Body:
    """The schemas in all places where clients put one, by their paths."""
    form = typed(body, "response_format", dict, {})
    kind = typed(form, "type", str, "text")
    if kind not in FORMATS:
        raise bad("response_format", f"response_format: {brief(kind, 100)} is not done here")
    check_listed(form, FORMATS[kind], "response_format.")
    given = body.get("json_schema")  # a schema, or an object that holds one
    if not isinstance(given, dict) or "schema" not in given:
        given = {"schema": given}
    inner = typed(form, "json_schema", dict, {})
    check_listed(given, JSON_SCHEMA, "json_schema.")
    check_listed(inner, JSON_SCHEMA, "response_format.json_schema.")
    schemas = {
        "json_schema": given["schema"],
        "response_format.schema": form.get("schema"),
        "response_format.json_schema": inner.get("schema"),
    }
    found = {path: schema for path, schema in schemas.items() if schema is not None}
    if kind == "json_object" and not found:
        return {"response_format": ANY_OBJECT}
    if kind == "json_schema" and not found:
        raise bad("response_format", "response_format must have a schema, in its json_schema")
    return found


# ---- Answers -----------------------------------------------------------------------------------


class Reply:
    """Makes the objects that answer one request."""

    def __init__(self, asked: Asked, offer: Offer):
        self.asked = asked
        self.tokenizer = offer.model.tokenizer
        self.id = ("chatcmpl-" if asked.is_chat else "cmpl-") + uuid4().hex
        self.model = offer.name
        self.created = int(time.time())
        # Of each text: the decoder of its tokens that have logprobs, and their characters so far.
        self.decoders = [self.tokenizer.incremental_decoder(not asked.echo) for _ in asked.streams]
        self.offsets = [0] * len(asked.streams)
        self.num_tokens: dict[int, int] = {}  # of each text
        self.readers: list[CallReader] = []  # of each text that may call functions
        if asked.tools is not None:
            names = [function.name for function in asked.tools.functions]
            self.readers = [CallReader(asked.tools.form, names) for _ in asked.streams]

    def completion(self, results: Sequence[Result]) -> Body:
        """All texts at once."""
        choices = []
        for result in results:
            i = result.index
            choice: Body = {"text": self._echo(i) + result.text}
            if self.asked.is_chat:
                choice = {"message": {"role": "assistant"} | self._message(i, result.text, True)}
            choices.append(choice | self._other_fields(i, result.logprobs or (), result))
            self.num_tokens[i] = len(result.tokens)
        return self._object(choices) | {"usage": self.usage()}

    def chunk(self, update: Update) -> Body:
        """What is new in one text."""
        i = update.index
        text = "".join(piece for piece, _ in update.pieces)
        choice: Body = {"text": self._echo(i) + text}
        if self.asked.is_chat:
            delta = self._message(i, text, update.result is not None)
            if i not in self.num_tokens:
                delta = {"role": "assistant"} | delta
            elif not delta["content"]:
                del delta["content"]
            choice = {"delta": delta}
        choice |= self._other_fields(i, update.logprobs, update.result)
        self.num_tokens[i] = update.num_tokens
        chunk = self._object([choice], ".chunk")
        if self.asked.shows_origins:
            chunk["origins"] = update.pieces
        if self.asked.continuous_usage:
            chunk["usage"] = self.usage()
        return chunk

    def usage_chunk(self) -> Body:
        """The last one, where it is asked for."""
        return self._object([], ".chunk") | {"usage": self.usage()}

    def usage(self) -> Body:
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

    def _object(self, choices: list[Body], part: str = "") -> Body:
        return {
            "id": self.id,
            "object": f"chat.completion{part}" if self.asked.is_chat else "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def _echo(self, index: int) -> str:
        """The prompt, if it is asked for, and nothing of the text was told yet."""
        if not self.asked.echo or index in self.num_tokens:
            return ""
        return self.tokenizer.decode(self.asked.streams[index].result.prompt_tokens)

    def _message(self, index: int, text: str, is_last: bool) -> Body:
        """The next piece of a chat's text, as a message: its content, and its calls."""
        if not self.readers:
            return {"content": text}
        delta = self.readers[index].feed(text, is_last)
        if not delta.calls:
            return {"content": delta.content}
        calls = list(delta.calls.values())
        if not self.asked.is_streamed:
            for call in calls:
                del call["index"]
        return {"content": delta.content or None, "tool_calls": calls}

    def _other_fields(
        self, index: int, logprobs: Sequence[TokenLogprob], result: Result | None
    ) -> Body:
        """The fields of a choice beside its text. logprobs: new ones; result: None until the text
        ends."""
        form = self._chat_logprobs if self.asked.is_chat else self._text_logprobs
        reason = None
        if result is not None:
            if result.error:
                raise bad(self.asked.param, result.error)
            reason = result.finish_reason
            if reason == "stop" and self.readers and self.readers[index].has_called:
                reason = "tool_calls"
        return {
            "index": index,
            "logprobs": form(index, logprobs),
            "finish_reason": reason,
        }

    # ---- Log-probabilities

    def _chat_logprobs(self, index: int, entries: Sequence[TokenLogprob]) -> Body | None:
        """Those of a chat's new tokens; None if there are none."""
        content = []
        for entry in entries:
            top = [self._token_fields(*pair) for pair in entry.top]
            fields = self._token_fields(entry.token, entry.logprob)
            content.append(fields | {"top_logprobs": top})
        return {"content": content} if content else None

    def _text_logprobs(self, index: int, entries: Sequence[TokenLogprob]) -> Body | None:
        """Those of a completion's new tokens, and first of its prompt's, if asked for; None if
        there are none."""
        rows: list[tuple[int, float | None, Body | None]] = []
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

    def _token_fields(self, token: int, logprob: float) -> Body:
        data = self.tokenizer.token_bytes(token, special=True)
        return {"token": self._token_text(token), "logprob": finite(logprob), "bytes": list(data)}

    def _token_text(self, token: int) -> str:
        return self.tokenizer.token_bytes(token, special=True).decode(errors="replace")


def finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)


def model_card(offer: Offer, started: int) -> Body:
    """The model, as /v1/models tells it."""
    return {
        "id": offer.name,
        "object": "model",
        "created": started,
        "owned_by": "llama",
        "root": offer.name,
        "max_model_len": offer.limit,
    }
