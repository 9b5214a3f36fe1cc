"""A chat template is Jinja: it runs in jinja2's sandbox, set up as in transformers.

The sandbox keeps a template from files and from Python's objects. A template comes with the model,
which the operator chose, so its bounds are simple: processor's time for one text, seen at each turn
of a loop and each call of a macro (SECONDS), and the characters of the text and of what `*` repeats
(LONGEST). What one filter allocates is not bounded.
"""

import json
import re
from collections.abc import Iterable
from datetime import datetime
from functools import lru_cache
from time import thread_time
from typing import TYPE_CHECKING, Any

from checkpoint.inert import Inert, inert, stand_ins, swap

if TYPE_CHECKING:
    import jinja2

SECONDS = 2.0
LONGEST = 2**22  # characters

OF_CLIENTS = {"messages", "tools"}  # values whose texts are anybody's
GENERATION = re.compile(r"(\{%[-+]?\s*(?:end)?)generation(\s*[-+]?%\})")


@lru_cache(4)
def compiled(source: str, letters: str) -> "jinja2.Template":
    """A template that calls `tick` at each turn of a loop. {% generation %}, which marks for
    training what an assistant says, is a block with variables of its own, as {% with %} is.
    letters: those that have a stand-in wherever they come from OF_CLIENTS (inert.py)."""
    import jinja2.sandbox  # 0.1 s, which nobody else needs
    from jinja2 import nodes

    class Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset({"*", "**"})

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if operator == "**" and right > 1000:
                raise OverflowError(f"{left} ** {right} is too large")
            for repeated, times in ((left, right), (right, left)):
                if hasattr(repeated, "__len__") and len(repeated) * times > LONGEST:
                    raise OverflowError(f"a text or a list is repeated to more than {LONGEST:,}")
            return super().call_binop(context, operator, left, right)

        def _parse(self, *args: Any) -> nodes.Template:
            tree = super()._parse(*args)
            for node in tree.find_all((nodes.For, nodes.Macro)):
                tick = nodes.Call(nodes.Name("tick", "load"), [], [], None, None)
                node.body.insert(0, nodes.ExprStmt(tick))
            return tree

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    template = environment.from_string(GENERATION.sub(r"\1with\2", source))
    if letters:

        def join(texts: Iterable[Any]) -> Inert:
            return Inert("".join(map(str, texts)), stand_ins(letters))

        environment.concat = join  # of what a macro or a block says
        template.root_render_func.__globals__["str_join"] = join  # of the operands of ~
    return template


def run_template(source: str, values: dict[str, Any], letters: str = "") -> str:
    """The text of a template. Whatever is wrong raises an Exception."""
    ends = thread_time() + SECONDS

    def tick() -> None:
        if thread_time() > ends:
            raise TimeoutError(f"it computes for more than {SECONDS} s")

    pieces = []
    size = 0
    for piece in compiled(source, letters).generate(values, tick=tick):
        size += len(piece)
        if size > LONGEST:
            raise OverflowError(f"its text has more than {LONGEST:,} characters")
        pieces.append(piece)
    return "".join(pieces)


def render(source: str, values: dict[str, Any], letters: str = "") -> tuple[str, str]:
    """The text, and an empty string; or an empty text, and what is wrong."""
    try:
        text = run_template(source, values)
        given = json.dumps([values.get(name) for name in OF_CLIENTS], ensure_ascii=False)
        if {*letters} & {*given}:
            marks = stand_ins(letters)
            written = swap(text, marks)
            values = values | {
                name: inert(values[name], marks) for name in OF_CLIENTS & values.keys()
            }
            text = run_template(source, values, letters)
            if swap(text, marks) != written:
                return "", "what it does with a control token in a message is not followed here"
    except Exception as error:  # a template is foreign code: it may raise anything
        return "", f"{type(error).__name__}: {error}"[:LONGEST]
    return text, ""
