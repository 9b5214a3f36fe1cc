"""Folders of models that call functions, and functions to call."""

import shutil
from pathlib import Path

from app.tools import CallFormat
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
    f"<tool_call>\n{CALL}\n</tool_call>", "<tool_call>", "</tool_call>", separator="\n"
)  # Qwen's, Hermes'
BARE = CallFormat(CALL.replace("arguments", "parameters"), "", "", None)  # Llama 3.1's
