"""The fields of a request: a closed list for each of its objects.

Clients send what other servers understand. A field that changes the text there must not be dropped
here without a word. So a field is of one of four kinds:

    honoured   `app/openai.py` reads it
    neutral    it has a value that asks for nothing, such as a penalty of 0: clients send all of
               their samplers, those that are switched off, too
    harmless   it changes no text: a label, a cache, or a detail of what is refused anyway
    refused    every other field, and every other value: an error names it

null is as if the field were left out. ALIASES are second names of a field, for which other servers
take one or the other.

The names come from the request models of OpenAI, vLLM, llama.cpp's server and SillyTavern
(test_fields.py has all of them), and from clients that others have reported.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from app.asgi import HttpError
from errors import brief, nearest
from settings import SETTINGS

Body = dict[str, Any]  # of a request or an answer: a JSON object
ALIASES = {
    "max_new_tokens": "max_tokens",
    "n_cmpl": "n",
    "n_predict": "max_tokens",
    "sampler_seed": "seed",
    "stopping_strings": "stop",
}


@dataclass(frozen=True)
class Fields:
    """The closed list of one kind of object."""

    honoured: frozenset[str]
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # the values
    harmless: frozenset[str] = frozenset()

    def check(self, given: Body, where: str = "") -> None:
        """HttpError that names the first field that is refused. where: the path to the object."""
        for name, value in given.items():
            is_known = name in self.honoured or name in self.harmless
            if is_known or value is None or value in self.neutral.get(name, ()):
                continue
            path = brief(where + name, 100)
            guess = "" if name in self.neutral else nearest(name, sorted(self.honoured))
            raise HttpError(400, f"{path} is not done here: leave it out{guess}", param=path)


def names(text: str) -> frozenset[str]:
    return frozenset(text.split())


def with_one_name(body: Body) -> Body:
    """The body without nulls and ALIASES. HttpError if a field has two values."""
    fields = {name: value for name, value in body.items() if value is not None}
    for alias, name in ALIASES.items():
        if alias in fields:
            value = fields.pop(alias)
            if fields.setdefault(name, value) != value:
                message = f"{alias} and {name} are one field: give one value"
                raise HttpError(400, message, param=alias)
    return fields


# ---- A body ------------------------------------------------------------------------------------

HONOURED = names(
    """
    model n stop max_tokens max_completion_tokens seed stop_token_ids ignore_eos logprobs
    stream stream_options response_format json_schema structured_outputs origins
    """
) | frozenset(SETTINGS)
NEUTRAL: dict[str, tuple[Any, ...]] = {
    # What is not in the text, or is not text.
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "reasoning_effort": ("none",),
    "reasoning_format": ("none",),
    "include_reasoning": (True,),
    "thinking_token_budget": (-1,),
    "reasoning_budget_tokens": (-1,),
    "thinking_forced_open": (False,),
    "verbosity": ("medium",),
    "store": (False,),
    # Prompts.
    "suffix": ("",),
    "echo": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "add_bos_token": (True,),
    "negative_prompt": ("",),
    "image_data": ([],),
    "lora": ([],),
    # Penalties and biases.
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "repeat_penalty": (1,),
    "rep_pen": (1,),
    "encoder_repetition_penalty": (1,),
    "penalize_nl": (False,),
    "no_repeat_ngram_size": (0,),
    "length_penalty": (1,),
    "logit_bias": ({}, []),
    "bad_words": ([],),
    "banned_strings": ([],),
    "custom_token_bans": ("", []),
    "allowed_token_ids": ([],),
    "logits_processors": ([],),
    # Other ways to draw a token.
    "do_sample": (True,),
    "best_of": (1,),
    "num_beams": (1,),
    "use_beam_search": (False,),
    "early_stopping": (False,),
    "penalty_alpha": (0,),
    "guidance_scale": (1,),
    "typical": (1,),
    "typical_p": (1,),
    "tfs": (1,),
    "tfs_z": (1,),
    "top_a": (0,),
    "skew": (0,),
    "nsigma": (0, -1),
    "top_n_sigma": (0, -1),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "min_keep": (0, 1),
    "mirostat": (0,),
    "mirostat_mode": (0,),
    "dry_multiplier": (0,),
    "xtc_probability": (0,),
    "adaptive_target": (-1,),
    "dynamic_temperature": (False,),
    "dynatemp_range": (0,),
    "smoothing_factor": (0,),
    "temperature_last": (False,),
    "watermarking": (False,),
    "repetition_detection": ({},),
    # Grammars.
    "grammar": ("",),
    "grammar_string": ("",),
    # The end of a text.
    "min_tokens": (0,),
    "min_new_tokens": (0,),
    "min_length": (0,),
    "ban_eos_token": (False,),
    "include_stop_str_in_output": (False,),
    "t_max_predict_ms": (0, -1),
    "n_indent": (0,),
    # What an answer tells.
    "prompt_logprobs": (0, False),
    "n_probs": (0,),
    "post_sampling_probs": (False,),
    "skip_special_tokens": (True,),
    "return_token_ids": (False,),
    "return_tokens": (False,),
    "return_tokens_as_token_ids": (False,),
    "return_prompt_text": (False,),
    "return_progress": (False,),
    "timings_per_token": (False,),
    "response_fields": ([],),
    # How a server works.
    "priority": (0,),
    "vllm_xargs": ({},),
}
HARMLESS = names(
    """
    user safety_identifier metadata request_id session_id service_tier api_type api_server
    legacy_api
    cache_prompt prompt_cache_key prompt_cache_options prompt_cache_retention id_slot n_cache_reuse
    n_keep n_discard truncation_length truncation_side backend_sampling stream_interval
    speculative.n_max speculative.n_min speculative.p_min speculative.type
    speculative.ngram_size_n speculative.ngram_size_m speculative.ngram_m_hits speculative_ngram
    parallel_tool_calls parse_tool_calls preserved_tokens grammar_lazy grammar_triggers
    guided_decoding_backend spaces_between_special_tokens
    media_io_kwargs mm_processor_kwargs return_mm_kwargs return_token_offsets
    routed_experts_prompt_start
    mirostat_tau mirostat_eta dry_base dry_allowed_length dry_penalty_last_n
    dry_sequence_breakers xtc_threshold adaptive_decay dynatemp_low dynatemp_high
    dynatemp_exponent smoothing_curve repeat_last_n rep_pen_range repetition_penalty_range
    reasoning_budget_start_tag reasoning_budget_end_tag reasoning_budget_message
    reasoning_budget_arm_immediately
    """
)
CHAT = Fields(
    HONOURED | names("messages top_logprobs"),
    NEUTRAL | {"add_special_tokens": (False,)},
    HARMLESS,
)
COMPLETION = Fields(
    HONOURED | names("prompt"),
    NEUTRAL | {"add_special_tokens": (True,), "top_logprobs": (0,)},
    HARMLESS,
)

# ---- Objects in a body -------------------------------------------------------------------------

MESSAGE = Fields(
    names("role content"),
    {
        "name": ("",),
        "tool_calls": ([],),
        "refusal": ("",),
        "annotations": ([],),
        "reasoning": ("", "\n"),
        "reasoning_content": ("", "\n"),
        "prefix": (False,),
        "partial": (False,),
    },
    names("id opts agent model messageId traceId timestamp usage metadata cache_control"),
)
PART = Fields(names("type text"), harmless=names("cache_control prompt_cache_breakpoint"))
STREAM_OPTIONS = Fields(
    names("include_usage continuous_usage_stats"), harmless=names("include_obfuscation")
)
FORMATS = {
    "text": Fields(names("type")),
    "json_object": Fields(names("type schema")),
    "json_schema": Fields(names("type schema json_schema")),
}
JSON_SCHEMA = Fields(names("schema"), harmless=names("name description strict"))
STRUCTURED_OUTPUTS = Fields(
    names("json json_object regex choice grammar"),
    {"disable_additional_properties": (False,)},
    names("disable_fallback disable_any_whitespace"),
)
