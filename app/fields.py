"""The bodies of requests: a closed list of fields for each of their objects.

Clients send what other servers understand. A field that changes the text there must not be dropped
here without a word. So a field is of one of four kinds:

    honoured   it is a field of a class on this page, and `app/openai.py` does what it asks
    neutral    it has a value that asks for nothing, such as one beam: clients send all of
               their samplers, those that are switched off, too
    harmless   it changes no text: a label, a cache, or a detail of what is refused anyway
    refused    every other field, and every other value: an error names it

What only a chat template can read is honoured by it, if it names the field.

null is as if the field were left out. ALIASES are second names of a field, for which other servers
take one or the other. The settings of sampling are honoured in both bodies; settings.py has their
names and checks.

The names come from the request models of OpenAI, vLLM, llama.cpp's server and SillyTavern
(test_fields.py has all of them), and from clients that others have reported.
"""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from checkpoint.files import parse_object
from errors import UserError, brief, nearest
from settings import MAX_LOGPROBS, PENALTIES, SETTINGS

FUNCTION_NAME = "[a-zA-Z0-9_-]{1,64}"  # OpenAI's rule
MAX_BRACKETS = 2**17  # of lists and objects: while Python looks for garbage, no other thread runs
ALIASES = {
    "max_new_tokens": "max_tokens",
    "n_cmpl": "n",
    "n_predict": "max_tokens",
    "sampler_seed": "seed",
    "stopping_strings": "stop",
    "think": "enable_thinking",
}
# Values that ask for nothing, and the fields in which they do. In Python False is 0, and True is 1.
GROUPS = (
    (
        (0, "", [], {}),
        """
        no_repeat_ngram_size penalize_nl penalty_alpha
        repetition_detection bad_words banned_strings custom_token_bans
        allowed_token_ids logits_processors
        use_beam_search early_stopping top_a skew epsilon_cutoff eta_cutoff min_keep
        mirostat mirostat_mode dry_multiplier xtc_probability dynamic_temperature
        dynatemp_range smoothing_factor temperature_last watermarking
        min_new_tokens min_length ban_eos_token n_indent
        include_stop_str_in_output grammar grammar_string
        suffix echo continue_final_message chat_template_kwargs documents negative_prompt
        safe_prompt tools functions image_data lora priority store vllm_xargs
        thinking_forced_open n_probs post_sampling_probs return_token_ids return_tokens
        return_tokens_as_token_ids return_prompt_text return_progress
        timings_per_token response_fields top_logprobs add_special_tokens special
        refusal annotations prefix partial disable_additional_properties
        """,
    ),
    (
        (1,),
        """
        repeat_penalty rep_pen encoder_repetition_penalty length_penalty
        do_sample best_of num_beams guidance_scale typical typical_p tfs tfs_z
        add_generation_prompt add_bos_token skip_special_tokens include_reasoning
        parse_tool_calls
        """,
    ),
    ((-1,), "adaptive_target thinking_token_budget reasoning_budget_tokens"),
    ((-1, 0), "nsigma top_n_sigma t_max_predict_ms"),
    (("none", "auto"), "tool_choice function_call reasoning_effort"),
    (("none", "auto", "deepseek"), "reasoning_format"),
    (("medium",), "verbosity"),
    ((["text"],), "modalities"),
    (("text", "message"), "type"),
)
NEUTRAL = {name: values for values, text in GROUPS for name in text.split()}
HARMLESS = set(
    """
    user safety_identifier metadata request_id session_id service_tier api_type api_server
    legacy_api prediction
    cache_prompt prompt_cache_key prompt_cache_options prompt_cache_retention id_slot n_cache_reuse
    keep_alive n_keep n_discard truncation_length truncation_side backend_sampling stream_interval
    speculative.n_max speculative.n_min speculative.p_min speculative.type
    speculative.ngram_size_n speculative.ngram_size_m speculative.ngram_m_hits speculative_ngram
    preserved_tokens grammar_lazy grammar_triggers
    guided_decoding_backend spaces_between_special_tokens
    media_io_kwargs mm_processor_kwargs return_mm_kwargs return_token_offsets
    routed_experts_prompt_start
    mirostat_tau mirostat_eta dry_base dry_allowed_length dry_penalty_last_n
    dry_sequence_breakers xtc_threshold adaptive_decay dynatemp_low dynatemp_high
    dynatemp_exponent smoothing_curve repeat_last_n rep_pen_range
    reasoning_budget_start_tag reasoning_budget_end_tag reasoning_budget_message
    reasoning_budget_arm_immediately
    cache_control prompt_cache_breakpoint include_obfuscation disable_fallback
    disable_any_whitespace
    """.split()
)


T = TypeVar("T")
List = Annotated[list[T], FailFast()]  # the first error will do: there may be many


# ---- Objects -----------------------------------------------------------------------------------


class Listed(BaseModel):
    """An object with a closed list of fields: those of its class, and `others`. Clients put labels
    there, too."""

    model_config = ConfigDict(strict=True, extra="allow")
    others: ClassVar[Sequence[str]] = ()
    labels: ClassVar[Sequence[str]] = ()

    @model_validator(mode="before")
    @classmethod
    def without_what_asks_for_nothing(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        honoured = [field.alias or name for name, field in cls.model_fields.items()]
        honoured += cls.others
        kept = {}
        for name, value in given.items():
            if value is None or name in HARMLESS or name in cls.labels:
                continue
            if name in honoured:
                kept[name] = as_whole(value)
            elif value not in NEUTRAL.get(name, ()):
                guess = "" if name in NEUTRAL else nearest(name, sorted(honoured))  # a typo
                raise PydanticCustomError(
                    "refused", "not supported", {"name": brief(name, 100), "guess": guess}
                )
        return kept


def as_whole(value: Any) -> Any:
    """100.0 is 100: to some clients all numbers are fractions."""
    is_whole = isinstance(value, float) and value.is_integer() and abs(value) <= 2**53
    return int(value) if is_whole else value


class NamedFunction(Listed):
    name: str = Field(pattern=f"^{FUNCTION_NAME}$")


class Function(NamedFunction):
    """A function that a request declares."""

    description: str = ""
    parameters: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
    strict: bool = False  # its arguments follow `parameters` in any case

    @field_validator("parameters")
    @classmethod
    def of_an_object(cls, schema: dict[str, Any]) -> dict[str, Any]:
        if schema.get("type", "object") != "object":
            raise PydanticCustomError(
                "no_object", "it must be of type object: arguments have names"
            )
        return schema if "type" in schema else {"type": "object"} | schema


class CalledFunction(Listed):
    """A function that an earlier answer has called. Chat templates want its arguments as an object;
    a text that is none (the answer was cut, say) is handed to them as it is."""

    labels = ("parsed_arguments",)
    name: str
    arguments: dict[str, Any] | str = {}

    @field_validator("arguments", mode="before")
    @classmethod
    def as_object(cls, text: Any) -> Any:
        try:
            return parse_object(text or "{}")
        except (TypeError, UserError):
            return text


class Tool(Listed):
    type: Literal["function"]
    function: Function

    def as_sent(self) -> dict[str, Any]:
        """What the client wrote, for the chat template; parameters are there in any case."""
        sent = self.model_dump(exclude_unset=True, exclude={"function": {"strict"}})
        sent["function"].setdefault("parameters", self.function.parameters)
        return sent


class Call(Listed):
    labels = ("index", "extra_content", "provider_specific_fields")
    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction


class Choice(Listed):
    """What the answer must call: this function, or what a word says."""

    type: Literal["none", "auto", "required", "function"] = "auto"
    function: NamedFunction | None = None


class Part(Listed):
    type: Literal["text", "input_text", "output_text"]  # as the Responses protocol says, too
    text: str


class ChatMessage(Listed):
    """A message of a conversation. Its content is a text, or a list of its parts."""

    labels = (
        "id opts agent model messageId traceId timestamp usage parsed reasoning_details "
        "thinking_blocks provider_specific_fields extra_fields"
    ).split()
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: List[Part] = []
    tool_calls: List[Call] = []  # of an assistant
    reasoning_content: str = ""  # of an assistant: its thoughts, with the name of most servers
    reasoning: str = ""  # and with vLLM's
    tool_call_id: str = ""
    name: str = ""

    @field_validator("content", mode="before")
    @classmethod
    def in_parts(cls, content: Any) -> Any:
        return [{"type": "text", "text": content}] if isinstance(content, str) else content


class Schema(Listed):
    labels = ("name", "description", "strict")
    value: Any = Field(None, alias="schema")


class ResponseFormat(Listed):
    type: Literal["text", "json_object", "json_schema"] = "text"
    value: Any = Field(None, alias="schema")
    json_schema: Schema = Schema()


class Outputs(Listed):
    others = ("json", "regex", "choice", "grammar")
    json_object: bool = False


class Thinking(Listed):
    """Whether the model is to think, as DeepSeek's and Anthropic's clients ask."""

    type: Literal["auto", "enabled", "disabled"] = "auto"


class StreamOptions(Listed):
    include_usage: bool = False
    continuous_usage_stats: bool = False


# ---- Bodies ------------------------------------------------------------------------------------


class Body(Listed):
    """What both bodies have."""

    others = (*SETTINGS, *PENALTIES, "seed")
    model: Any = None
    n: int = 1
    stop: Any = []
    max_tokens: int | None = Field(None, ge=-1)  # −1: as many as fit
    max_completion_tokens: int | None = Field(None, ge=-1)
    stop_token_ids: List[int] = []
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    response_format: ResponseFormat = ResponseFormat()
    json_schema: Schema = Schema()
    structured_outputs: Outputs = Outputs()
    origins: bool = False
    repetition_penalty_range: int = 0

    @field_validator("json_schema", mode="before")
    @classmethod
    def within_an_object(cls, given: Any) -> Any:
        """A schema, or an object that holds one -> the latter."""
        holds_one = isinstance(given, dict) and "schema" in given
        return given if holds_one else {"schema": given}


class ChatBody(Body):
    is_chat: ClassVar[bool] = True
    echo: ClassVar[bool] = False  # a chat's prompt is not told again
    messages: List[ChatMessage] = []
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MAX_LOGPROBS)
    tools: List[Tool] = []
    tool_choice: Choice = Choice()
    parallel_tool_calls: bool = True
    reasoning_effort: str = Field("auto", pattern=r"^\w{1,32}$")
    reasoning_format: Literal["none", "auto", "deepseek"] = "auto"
    enable_thinking: bool | None = None
    thinking: Thinking = Thinking()
    chat_template_kwargs: dict[str, Any] = {}

    @field_validator("tool_choice", mode="before")
    @classmethod
    def as_type(cls, given: Any) -> Any:
        return {"type": given} if isinstance(given, str) else given


class TextBody(Body):
    is_chat: ClassVar[bool] = False
    prompt: Any = None
    logprobs: int | None = None
    echo: bool = False
    special: bool = False
    add_special_tokens: bool = True


def read_body(data: bytes, kind: type[T]) -> T:
    """A ChatBody or a TextBody. UserError names the first field that is wrong."""
    if data.count(b"[") + data.count(b"{") > MAX_BRACKETS:
        raise UserError(f"the body has more than {MAX_BRACKETS:,} lists and objects")
    try:
        body = parse_object(data.decode("utf-8-sig"))
    except ValueError as error:  # UserError and UnicodeError are such
        raise UserError(f"the body is not a JSON object: {brief(error, 200)}") from None
    try:
        return kind.model_validate(without_aliases(body))
    except ValidationError as error:
        raise refusal(error) from None


OBJECT = "it must be an object"


def refusal(error: ValidationError) -> UserError:
    """Its first error, with the path of the field."""
    first = error.errors(include_url=False)[0]
    path = ""
    for part in first["loc"]:
        path += f"[{part}]" if isinstance(part, int) else f".{part}"
    path = path.removesuffix(".dict[str,any]")  # which kind of arguments it is not
    match first["type"]:
        case "refused":
            path += f".{first['ctx']['name']}"
            rule = f"is not supported: leave it out{first['ctx']['guess']}"
        case "missing":
            rule = "is missing"
        case kind:
            must = first["msg"].replace("Input should", "it must", 1)
            must = OBJECT if kind in ("model_type", "dict_type") else must
            rule = f"is {brief(repr(first['input']), 100)}: {must}"
    path = path.removeprefix(".")
    return UserError(f"{path} {rule}", path)


def without_aliases(body: dict[str, Any]) -> dict[str, Any]:
    """The body without nulls and ALIASES. UserError if a field has two values."""
    fields = {name: value for name, value in body.items() if value is not None}
    for alias, name in ALIASES.items():
        if alias in fields:
            value = fields.pop(alias)
            if fields.setdefault(name, value) != value:
                message = f"{alias} and {name} are one field: give one value"
                raise UserError(message, alias)
    return fields
