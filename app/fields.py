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

from collections.abc import Collection
from typing import Any

from app.asgi import HttpError
from errors import brief, nearest
from settings import SETTINGS

Body = dict[str, Any]  # of a request or an answer: a JSON object
# The fields that are honoured: in both paths, in each of them, and in a message.
BOTH = """
    model n seed stop max_tokens max_completion_tokens stop_token_ids ignore_eos logprobs stream
    stream_options response_format json_schema structured_outputs origins
"""
TOOLS = {"tools", "tool_choice", "parallel_tool_calls"}
CHAT = {*SETTINGS, *BOTH.split(), "messages", "top_logprobs", "chat_template_kwargs", *TOOLS}
COMPLETION = {*SETTINGS, *BOTH.split(), "prompt", "echo", "add_special_tokens", "special"}
# All but role and content are labels that clients put there.
MESSAGE = set("role content id opts agent model messageId traceId timestamp usage parsed".split())
MESSAGE_WITH_TOOLS = {  # by its role, if the model can call functions
    "assistant": {*MESSAGE, "tool_calls"},
    "tool": {*MESSAGE, "tool_call_id", "name"},
}
ALIASES = {
    "max_new_tokens": "max_tokens",
    "n_cmpl": "n",
    "n_predict": "max_tokens",
    "sampler_seed": "seed",
    "stopping_strings": "stop",
}
OFF = (0, "", [], {})  # and False, which is 0 in Python
ON = (1,)  # and True
# Values that ask for nothing, and the fields in which they do.
GROUPS: tuple[tuple[tuple[Any, ...], str], ...] = (
    (
        OFF,
        """
        frequency_penalty presence_penalty no_repeat_ngram_size penalize_nl penalty_alpha
        repetition_detection logit_bias bad_words banned_strings custom_token_bans
        allowed_token_ids logits_processors
        use_beam_search early_stopping top_a skew epsilon_cutoff eta_cutoff min_keep
        mirostat mirostat_mode dry_multiplier xtc_probability dynamic_temperature
        dynatemp_range smoothing_factor temperature_last watermarking
        min_tokens min_new_tokens min_length ban_eos_token n_indent
        include_stop_str_in_output grammar grammar_string
        suffix echo continue_final_message chat_template_kwargs documents negative_prompt
        safe_prompt tools functions image_data lora priority store vllm_xargs
        thinking_forced_open n_probs post_sampling_probs return_token_ids return_tokens
        return_tokens_as_token_ids return_prompt_text return_progress
        timings_per_token response_fields top_logprobs add_special_tokens special
        name tool_calls refusal annotations prefix partial disable_additional_properties
        """,
    ),
    (
        ON,
        """
        repetition_penalty repeat_penalty rep_pen encoder_repetition_penalty length_penalty
        do_sample best_of num_beams guidance_scale typical typical_p tfs tfs_z
        add_generation_prompt add_bos_token skip_special_tokens include_reasoning
        parse_tool_calls
        """,
    ),
    ((-1,), "adaptive_target thinking_token_budget reasoning_budget_tokens"),
    ((-1, 0), "nsigma top_n_sigma t_max_predict_ms"),
    (("none", "auto"), "tool_choice function_call reasoning_effort reasoning_format"),
    (("medium",), "verbosity"),
    ((["text"],), "modalities"),
    (("", "\n"), "reasoning reasoning_content"),
    (("text", "message"), "type"),
)
NEUTRAL = {name: values for values, text in GROUPS for name in text.split()}
HARMLESS = set(
    """
    user safety_identifier metadata request_id session_id service_tier api_type api_server
    legacy_api
    cache_prompt prompt_cache_key prompt_cache_options prompt_cache_retention id_slot n_cache_reuse
    n_keep n_discard truncation_length truncation_side backend_sampling stream_interval
    speculative.n_max speculative.n_min speculative.p_min speculative.type
    speculative.ngram_size_n speculative.ngram_size_m speculative.ngram_m_hits speculative_ngram
    preserved_tokens grammar_lazy grammar_triggers
    guided_decoding_backend spaces_between_special_tokens
    media_io_kwargs mm_processor_kwargs return_mm_kwargs return_token_offsets
    routed_experts_prompt_start
    mirostat_tau mirostat_eta dry_base dry_allowed_length dry_penalty_last_n
    dry_sequence_breakers xtc_threshold adaptive_decay dynatemp_low dynatemp_high
    dynatemp_exponent smoothing_curve repeat_last_n rep_pen_range repetition_penalty_range
    reasoning_budget_start_tag reasoning_budget_end_tag reasoning_budget_message
    reasoning_budget_arm_immediately
    cache_control prompt_cache_breakpoint include_obfuscation disable_fallback
    disable_any_whitespace
    """.split()
)


def check_listed(given: Body, honoured: Collection[str], where: str = "") -> None:
    """HttpError that names the first field that is refused. where: the path to the object, which
    ends with a dot."""
    for name, value in given.items():
        is_known = name in honoured or name in HARMLESS
        if is_known or value is None or value in NEUTRAL.get(name, ()):
            continue
        path = brief(where + name, 100)
        guess = "" if name in NEUTRAL else nearest(name, sorted(honoured))  # a typo
        raise HttpError(400, f"{path} is not done here: leave it out{guess}", param=path)


def without_aliases(body: Body) -> Body:
    """The body without nulls and ALIASES. HttpError if a field has two values."""
    fields = {name: value for name, value in body.items() if value is not None}
    for alias, name in ALIASES.items():
        if alias in fields:
            value = fields.pop(alias)
            if fields.setdefault(name, value) != value:
                message = f"{alias} and {name} are one field: give one value"
                raise HttpError(400, message, param=alias)
    return fields
