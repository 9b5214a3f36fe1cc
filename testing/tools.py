"""Folders of models that call functions, and functions to call."""

import shutil
from pathlib import Path

from app.answers import CallFormat
from testing.pages import ROOT

POINT = {  # as pydantic writes it
    "$defs": {"Number": {"type": "integer", "minimum": 0, "maximum": 99}},
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/Number"}},
    "required": ["a"],
    "additionalProperties": False,
}

TEMPLATES = {
    True: """\
{% for tool in tools or [] %}{{ tool.function.name }}{{ tool.function.parameters | tojson }}
{% endfor %}
{% for message in messages %}{{ message.role }}: {{ message.content }}
{% for call in message.tool_calls %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{% endfor %}
{% endfor %}
""",
    False: """\
{% if tools %}{"name": function, "parameters": object}{{ tools[0] | tojson(indent=1) }}{% endif %}
{% for message in messages %}{{ message.role }}: {{ message.content }}
{% if message.tool_calls %}{% set call = message.tool_calls[0].function %}
{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}
{% endif %}
{% endfor %}
""",
}
WORDS = {
    "type": "object",
    "properties": {"word": {"enum": ["dog", "cat"]}},
    "required": ["word"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "say", "parameters": WORDS}},
    {"type": "function", "function": {"name": "add", "parameters": POINT, "description": "Adds"}},
]


def with_tools(folder: Path, is_tagged: bool) -> Path:
    """A folder with the embedded model, and a chat template that has tools."""
    shutil.copytree(ROOT / "models" / "tiny", folder)
    (folder / "chat_template.jinja").write_text(TEMPLATES[is_tagged])
    return folder


CALL = '{"name": "zqname", "arguments": \0}'
TAGGED = CallFormat(
    f"<tool_call>\n{CALL}\n</tool_call>",
    opening="<tool_call>",
    closing="</tool_call>",
    separator="\n",
    one_call=False,
)  # Qwen's, Hermes'
BARE = CallFormat(CALL.replace("arguments", "parameters"), "", "", None, True)  # Llama 3.1's

# Laid out as Qwen 3's and as R1's, distilled, are, in words of this page: with thoughts and tools.
_ANSWER = """\
{%- for call in m.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": \
{{ call.function.arguments if call.function.arguments is string else \
call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|end|>
"""
_TOOLS = "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}{% for m in messages %}"
REASONING = {
    "Qwen 3": _TOOLS
    + """<|{{ m.role }}|>
{% if m.role == 'assistant' and m.reasoning_content %}<think>
{{ m.reasoning_content.strip('\n') }}
</think>

{% endif %}{{ m.content }}"""
    + _ANSWER
    + """{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% if enable_thinking is false %}<think>

</think>

{% endif %}{% endif %}""",
    "R1": _TOOLS
    + "{% set is_answer = m.role == 'assistant' %}<|{{ m.role }}|>"
    + "{{ m.content.split('</think>')[-1] if is_answer else m.content }}"
    + _ANSWER
    + "{% endfor %}{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}",
    "Llama 3.1": _TOOLS
    + "{% if m.tool_calls %}{% if m.tool_calls | length > 1 %}{{ raise_exception('one call') }}"
    '{% endif %}<|assistant|>{"name": "{{ m.tool_calls[0].function.name }}", "parameters": '
    "{{ m.tool_calls[0].function.arguments | tojson }}}<|end|>{% else %}<|{{ m.role }}|>"
    "{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}",
}
