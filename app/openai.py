"""OpenAI's protocol: what a client may ask for, and what it is answered.

`/v1/chat/completions` and `/v1/completions`, with the fields that vLLM has added (top_k, min_p,
ignore_eos, stop_token_ids, structured_outputs). A field is one of three kinds:

    honoured   it has a line in `parse`
    refused    it would change the text and is not done here: an error names it (REFUSED)
    ignored    all others (user, metadata, …): they are for somebody else

null is as if the field were left out. `parse` reads a request and `Reply` writes the answers to it:
one object, or, streamed, a chunk for all that is new of a text, with the role in the first and the
finish_reason in the last.
"""

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

from app.asgi import HttpError
from checkpoint.files import parse_json
from errors import UserError, brief
from generate import Model
from request import Message, OutputStream, Request, Result, Settings, check_whole
from sampling import TokenLogprob
from serve import Update

Body = dict[str, Any]  # of a request or an answer: a JSON object

DEFAULT_MAX_TOKENS = 16  # of /v1/completions; a chat's answer takes what the context leaves
MAX_CHOICES = 128  # prompts · n
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1000
MAX_CHARACTERS_A_TOKEN = 32  # a longer prompt is refused before it is cut into tokens
LEAST_LOGPROB = -9999.0  # JSON has no −∞
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seed")
# Fields that are not done here -> the values that ask for nothing.
REFUSED: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "audio": (),
    "modalities": (["text"],),
    "prediction": (),
    "web_search_options": (),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "min_tokens": (0,),
    "suffix": ("",),
    "echo": (False,),
    "use_beam_search": (False,),
    "bad_words": ([],),
    "allowed_token_ids": ([],),
    "prompt_logprobs": (0, False),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
}


# ---- Requests ----------------------------------------------------------------------------------


@dataclass
class Served:
    """What a server offers: a model under a name, and the longest text."""

    model: Model
    name: str
    limit: int  # tokens of prompt and answer
    settings: Settings  # what the command line chose: γ


@dataclass
class Asked:
    """What one client asks for."""

    is_chat: bool
    streams: list[OutputStream]  # n of the first prompt, then n of the second, …
    is_streamed: bool = False
    include_usage: bool = False  # in a last chunk
    continuous_usage: bool = False  # in every chunk
    shows_origins: bool = False


def parse(data: bytes, is_chat: bool, served: Served) -> Asked:
    """Read a request's body. HttpError or UserError for what is wrong."""
    body = read_object(data)
    check_refused(body)
    name = body.get("model", served.name)
    if name != served.name:
        raise HttpError(
            404,
            f"there is no model {brief(repr(name), 100)}: this server has {served.name!r}",
            param="model",
            code="model_not_found",
        )
    prompts = chat_prompts(body, served) if is_chat else completion_prompts(body, served)
    n = body.get("n", 1)
    check_whole("n", n, 1, MAX_CHOICES)
    if n * len(prompts) > MAX_CHOICES:
        raise UserError(
            f"{len(prompts)} prompts and n = {n}: together at most {MAX_CHOICES} texts are made"
        )
    if body.get("best_of", n) != n:
        raise HttpError(
            400, "best_of is not done here: leave it out, or ask for n", param="best_of"
        )
    settings = read_settings(body, is_chat, served)
    streams = []
    for prompt in prompts:
        streams += make_streams(prompt, n, len(streams), settings, body, is_chat, served)
    options = typed(body, "stream_options", dict, {})
    return Asked(
        is_chat,
        streams,
        typed(body, "stream", bool, False),
        typed(options, "include_usage", bool, False),
        typed(options, "continuous_usage_stats", bool, False),
        typed(body, "origins", bool, False),
    )


def read_object(data: bytes) -> Body:
    """The JSON object of a body, without the fields that are null."""
    try:
        body = parse_json(data.decode())
    except (ValueError, RecursionError) as error:
        raise HttpError(400, f"the body is not JSON: {brief(error, 200)}") from None
    if not isinstance(body, dict):
        raise HttpError(400, "the body is not a JSON object")
    return {name: value for name, value in body.items() if value is not None}


def check_refused(body: Body) -> None:
    for name, harmless in REFUSED.items():
        if name in body and body[name] not in harmless:
            raise HttpError(400, f"{name} is not done here: leave it out", param=name)


def typed(fields: Body, name: str, kind: type, default: Any) -> Any:
    """A field's value. HttpError if it is of another type."""
    value = fields.get(name)
    if value is None:
        return default
    if not isinstance(value, kind):
        shown = brief(repr(value), 100)
        raise HttpError(400, f"{name} is {shown}: it must be a {kind.__name__}", param=name)
    return value


# ---- Prompts


def chat_prompts(body: Body, served: Served) -> list[list[int]]:
    """The tokens of a conversation. A model without a chat template goes on from its texts."""
    messages = typed(body, "messages", list, [])
    if not messages:
        raise HttpError(400, "messages is empty: it must be a list of messages", param="messages")
    conversation = [read_message(n, message) for n, message in enumerate(messages)]
    check_characters((message["content"] for message in conversation), served, "messages")
    if served.model.uses_template(None):
        tokens = served.model.encode(conversation)
    else:
        tokens = served.model.encode("\n".join(message["content"] for message in conversation))
    return [checked_length(tokens, served, "messages")]


def read_message(n: int, message: Any) -> Message:
    """A message with one text, as chat templates want it."""
    where = f"messages[{n}]"
    if not isinstance(message, dict):
        raise HttpError(400, f"{where} is no object", param=where)
    role = message.get("role")
    if role not in ROLES:
        shown = brief(repr(role), 100)
        raise HttpError(
            400, f"{where} has the role {shown}: there are {', '.join(ROLES)}", param=where
        )
    for name in ("tool_calls", "function_call", "audio"):
        if message.get(name):
            raise HttpError(400, f"{where} has {name}, which is not done here", param=where)
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(read_part(where, part) for part in content)
    if not isinstance(content, str):
        raise HttpError(400, f"{where} has no content, which must be text", param=where)
    return {"role": ROLES[role], "content": content}


def read_part(where: str, part: Any) -> str:
    """The text of {"type": "text", "text": …}."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text" or not isinstance(part.get("text"), str):
        shown = brief(repr(kind), 100)
        raise HttpError(
            400, f"{where} has a part of type {shown}: only text is read here", param=where
        )
    return part["text"]


def completion_prompts(body: Body, served: Served) -> list[list[int]]:
    """One prompt or several, each as a text or as its tokens -> the tokens of each."""
    prompt = body.get("prompt")
    prompts = [prompt]
    if isinstance(prompt, list) and not is_tokens(prompt):
        prompts = prompt
    if len(prompts) > MAX_CHOICES:
        raise HttpError(
            400, f"{len(prompts)} prompts: at most {MAX_CHOICES} are read", param="prompt"
        )
    return [checked_length(prompt_tokens(one, served), served, "prompt") for one in prompts]


def is_tokens(prompt: Any) -> bool:
    return isinstance(prompt, list) and all(type(token) is int for token in prompt)


def prompt_tokens(prompt: Any, served: Served) -> list[int]:
    if isinstance(prompt, str):
        check_characters([prompt], served, "prompt")
        return served.model.encode(prompt, chat=False)
    if not is_tokens(prompt):
        raise HttpError(400, "prompt must be a text, tokens, or a list of these", param="prompt")
    last = served.model.tokenizer.vocab_size - 1
    if not all(0 <= token <= last for token in prompt):
        raise HttpError(400, f"prompt: tokens are from 0 to {last}", param="prompt")
    return prompt


def check_characters(texts: Iterable[str], served: Served, param: str) -> None:
    """Refuse what can hardly fit, before it costs the time to cut it into tokens."""
    size = sum(map(len, texts))
    if size > MAX_CHARACTERS_A_TOKEN * served.limit:
        raise too_long(f"{param}: {size:,} characters", served, param)


def checked_length(tokens: list[int], served: Served, param: str) -> list[int]:
    if not tokens:
        raise HttpError(400, f"{param} is empty", param=param)
    if len(tokens) >= served.limit:
        raise too_long(f"{param}: {len(tokens):,} tokens", served, param)
    return tokens


def too_long(what: str, served: Served, param: str) -> HttpError:
    return HttpError(
        400,
        f"{what}, and prompt and answer have at most {served.limit:,} tokens: shorten it",
        param=param,
        code="context_length_exceeded",
    )


# ---- Settings


def read_settings(body: Body, is_chat: bool, served: Served) -> Settings:
    """UserError or HttpError for a bad value."""
    chosen: Body = {name: body[name] for name in SAMPLING if name in body}
    if chosen.get("top_k") == -1:  # all, says vLLM
        chosen["top_k"] = 0
    stop = body.get("stop") or []
    stops = [stop] if isinstance(stop, str) else stop
    is_long = any(len(text) > MAX_STOP_CHARACTERS for text in stops if isinstance(text, str))
    if isinstance(stops, list) and (len(stops) > MAX_STOPS or is_long):
        raise HttpError(
            400,
            f"stop: at most {MAX_STOPS} texts of {MAX_STOP_CHARACTERS} characters are read",
            param="stop",
        )
    chosen["stop"] = stops
    default = served.limit if is_chat else DEFAULT_MAX_TOKENS
    chosen["max_tokens"] = body.get("max_completion_tokens", body.get("max_tokens", default))
    chosen["logprobs"] = read_logprobs(body, is_chat)
    return replace(served.settings, **chosen, **read_constraint(body))


def read_logprobs(body: Body, is_chat: bool) -> int | None:
    """For how many tokens of each place ln p is wanted; None: not even for the text's own."""
    if not is_chat:
        return body.get("logprobs")
    num_top = body.get("top_logprobs")
    if typed(body, "logprobs", bool, False):
        return num_top or 0
    if num_top:
        raise HttpError(400, "top_logprobs needs logprobs: set it to true", param="top_logprobs")
    return None


def read_constraint(body: Body) -> Body:
    """response_format and structured_outputs, as settings: schema, regex, choice or grammar."""
    chosen: Body = {}
    form = typed(body, "response_format", dict, {})
    kind = form.get("type", "text")
    if kind == "json_object":
        chosen["schema"] = {"type": "object"}
    elif kind == "json_schema":
        chosen["schema"] = typed(form, "json_schema", dict, {}).get("schema", {})
    elif kind != "text":
        shown = brief(repr(kind), 100)
        raise HttpError(
            400,
            f"response_format has the type {shown}: there are text, json_object and json_schema",
            param="response_format",
        )
    structured = typed(body, "structured_outputs", dict, {})
    names = {"json": "schema", "regex": "regex", "choice": "choice", "grammar": "grammar"}
    for name, value in structured.items():
        if value is None:
            continue
        if name == "json_object" and value is True:
            chosen["schema"] = {"type": "object"}
        elif name in names:
            chosen[names[name]] = value
        else:
            raise HttpError(
                400,
                f"structured_outputs has {brief(name, 100)!r}, which is not done here",
                param="structured_outputs",
            )
    for name in chosen:
        if name not in Settings.__dataclass_fields__:
            asked = "response_format" if kind != "text" else "structured_outputs"
            raise HttpError(400, f"{asked} is not done here: leave it out", param=asked)
    return chosen


def make_streams(
    tokens: list[int],
    n: int,
    index: int,
    settings: Settings,
    body: Body,
    is_chat: bool,
    served: Served,
) -> list[OutputStream]:
    """n texts of a prompt, with the seeds seed, seed + 1, …; they share the prompt's cache."""
    model = served.model
    is_reply = is_chat and model.uses_template(None)
    first = model.request_of(tokens, settings, served.limit, is_reply)
    ends = set(typed(body, "stop_token_ids", list, []))
    if not typed(body, "ignore_eos", bool, False):
        ends |= model.eos_token_ids
    first.eos_token_ids = ends
    streams = []
    for i in range(n):
        request = first
        if i > 0:
            chosen = replace(first.settings, seed=first.settings.seed + i)
            request = Request(tokens, chosen, ends, sibling=first, is_reply=is_reply)
        streams.append(OutputStream(model.tokenizer, request, "", index=index + i))
    return streams


# ---- Answers -----------------------------------------------------------------------------------


class Reply:
    """Makes the objects that answer one request."""

    def __init__(self, asked: Asked, served: Served):
        self.asked = asked
        self.tokenizer = served.model.tokenizer
        self.id = ("chatcmpl-" if asked.is_chat else "cmpl-") + uuid4().hex
        self.model = served.name
        self.created = int(time.time())
        self.offsets = [0] * len(asked.streams)  # characters of each text that have logprobs
        self.num_tokens = [0] * len(asked.streams)  # of each text
        self.told_role: set[int] = set()

    def completion(self, results: Sequence[Result]) -> Body:
        """All texts at once."""
        choices = []
        for result in results:
            self.num_tokens[result.index] = len(result.tokens)
            choice: Body = {"index": result.index}
            if self.asked.is_chat:
                choice["message"] = {"role": "assistant", "content": result.text, "refusal": None}
            else:
                choice["text"] = result.text
            choice["logprobs"] = self._logprobs(result.index, result.logprobs)
            choice["finish_reason"] = result.finish_reason
            choices.append(choice)
        kind = "chat.completion" if self.asked.is_chat else "text_completion"
        return self._object(kind, choices) | {"usage": self.usage()}

    def chunk(self, update: Update) -> Body:
        """What is new in one text."""
        i = update.index
        self.num_tokens[i] = update.num_tokens
        text = "".join(piece for piece, _ in update.pieces)
        choice: Body = {"index": i}
        if self.asked.is_chat:
            delta = {"content": text} if text else {}
            if i not in self.told_role:
                self.told_role.add(i)
                delta = {"role": "assistant", "content": text}
            choice["delta"] = delta
        else:
            choice["text"] = text
        choice["logprobs"] = self._logprobs(i, update.logprobs or None)
        choice["finish_reason"] = None
        if update.result is not None:
            choice["finish_reason"] = update.result.finish_reason
        kind = "chat.completion.chunk" if self.asked.is_chat else "text_completion"
        chunk = self._object(kind, [choice])
        if self.asked.shows_origins:
            chunk["origins"] = update.pieces
        if self.asked.continuous_usage:
            chunk["usage"] = self.usage()
        return chunk

    def usage_chunk(self) -> Body:
        """The last one, where it is asked for."""
        kind = "chat.completion.chunk" if self.asked.is_chat else "text_completion"
        return self._object(kind, []) | {"usage": self.usage()}

    def usage(self) -> Body:
        """Tokens. Texts of one prompt share it."""
        prompts = [stream.request for stream in self.asked.streams]
        prompts = [request for request in prompts if request.sibling is None]
        num_prompt_tokens = sum(request.num_prompt_tokens for request in prompts)
        num_cached = sum(request.num_cached_tokens for request in prompts)
        num_tokens = sum(self.num_tokens)
        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_tokens,
            "total_tokens": num_prompt_tokens + num_tokens,
            "prompt_tokens_details": {"cached_tokens": num_cached},
        }

    def _object(self, kind: str, choices: list[Body]) -> Body:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    # ---- Log-probabilities

    def _logprobs(self, index: int, entries: Sequence[TokenLogprob] | None) -> Body | None:
        if entries is None:
            return None
        if self.asked.is_chat:
            return {"content": [self._chat_entry(entry) for entry in entries], "refusal": None}
        offsets = []
        tops = []
        for entry in entries:
            offsets.append(self.offsets[index])
            self.offsets[index] += len(self._text(entry.token))
            tops.append({self._text(token): told(logprob) for token, logprob in entry.top})
        return {
            "tokens": [self._text(entry.token) for entry in entries],
            "token_logprobs": [told(entry.logprob) for entry in entries],
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def _chat_entry(self, entry: TokenLogprob) -> Body:
        fields = self._token(entry.token, entry.logprob)
        fields["top_logprobs"] = [self._token(token, logprob) for token, logprob in entry.top]
        return fields

    def _token(self, token: int, logprob: float) -> Body:
        data = self.tokenizer.token_bytes(token, special=True)
        return {"token": self._text(token), "logprob": told(logprob), "bytes": list(data)}

    def _text(self, token: int) -> str:
        return self.tokenizer.token_bytes(token, special=True).decode(errors="replace")


def told(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)


def models(served: Served, started: int) -> Body:
    """What /v1/models answers."""
    return {"object": "list", "data": [model_card(served, started)]}


def model_card(served: Served, started: int) -> Body:
    return {
        "id": served.name,
        "object": "model",
        "created": started,
        "owned_by": "llama",
        "root": served.name,
        "parent": None,
        "max_model_len": served.limit,
    }


def to_json(content: Body) -> str:
    return json.dumps(content)
