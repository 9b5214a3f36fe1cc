"""A chat template is a stranger's program: it runs in a process of its own, within bounds.

    here   ── a line of JSON: the template, and what it is given ──►   child
    here   ◄── a line of JSON: the text, or what is wrong ──           child

In the child, jinja2's sandbox, with the additions of transformers, keeps a template from files and
from Python's objects. It bounds neither time nor memory (`{{ 'x' * 10**10 }}`). These do:

    processor's time for one text    SECONDS    the kernel ends the child
    memory of the child              MEMORY     an allocation fails, which ends it
    characters of one text           LONGEST    the text stays in the child

The user is told which one it was, and the next text has a new child. A child ends with this
process, however that ends: its input ends then.

Cost: a child starts in 0.1 s, while weights are loaded; then a short chat takes 0.7 ms: the
template runs four times (chat.py). Not covered: several texts at a time; they wait.
"""

import atexit
import json
import re
import resource
import signal
import sys
from collections.abc import Iterable
from contextlib import suppress
from datetime import datetime
from functools import cache, lru_cache
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from threading import Lock
from typing import TYPE_CHECKING, Any

from checkpoint.inert import Inert, inert, stand_ins

if TYPE_CHECKING:
    import jinja2

SECONDS = 2.0
MEMORY = 2**30  # bytes
LONGEST = 2**22  # characters
OUT_OF_MEMORY = 3  # an exit status


# ---- Here


class Renderer:
    """Renders templates in a child, for all threads."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._start()
        atexit.register(self._end)

    def _start(self) -> None:
        self._child = Popen(
            [sys.executable, "-m", "checkpoint.sandbox"],
            stdin=PIPE,
            stdout=PIPE,
            stderr=DEVNULL,
            text=True,
            cwd=Path(__file__).parents[1],
            start_new_session=True,  # Ctrl-C is for this process
        )

    def _end(self) -> int:
        """End the child -> its status."""
        with suppress(BrokenPipeError), self._child:  # closes the pipes, and waits
            self._child.kill()
        return self._child.returncode

    def render(self, source: str, values: dict[str, Any], letters: str = "") -> tuple[str, str]:
        """The text, or else what is wrong. letters: those that have a stand-in wherever they come
        from OF_CLIENTS (inert.py)."""
        request = json.dumps([SECONDS, source, values, letters])
        with self._lock:
            if self._child.poll() is not None:  # somebody ended it
                self._start()
            try:
                print(request, file=self._child.stdin, flush=True)
                return json.loads(self._child.stdout.readline())
            except BaseException as error:  # after Ctrl-C, too: the next text would be this one's
                status = self._end()
                if not isinstance(error, (BrokenPipeError, ValueError)):
                    raise
        problems = {
            -signal.SIGPROF: f"it computes for more than {SECONDS} s",
            OUT_OF_MEMORY: f"it needs more than {MEMORY // 2**20} MiB of memory",
        }
        return "", problems.get(status, f"its process ended with status {status}")


@cache
def renderer() -> Renderer:
    """The one of this process."""
    return Renderer()


# ---- In the child


OF_CLIENTS = {"messages", "tools"}  # values whose texts are anybody's
GENERATION = re.compile(r"(\{%[-+]?\s*(?:end)?)generation(\s*[-+]?%\})")


@lru_cache(2)
def compiled(source: str, letters: str) -> "jinja2.Template":
    """A template in jinja2's sandbox, as transformers sets it up. {% generation %}, which marks for
    training what an assistant says, is a block with variables of its own, as {% with %} is."""
    import jinja2.sandbox  # 0.1 s, which nobody else needs

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
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


def rendered(source: str, values: dict[str, Any], letters: str) -> tuple[str, str]:
    """What `Renderer.render` returns."""
    try:
        text = compiled(source, "").render(**values)
        if letters:
            marks = stand_ins(letters)
            written = text.translate(marks)
            values |= {name: inert(values[name], marks) for name in OF_CLIENTS & values.keys()}
            text = compiled(source, letters).render(**values)
            if text.translate(marks) != written:
                return "", "what it does with a control token in a message is not followed here"
    except MemoryError:
        raise
    except Exception as error:  # a template is foreign code: it may raise anything
        return "", f"{type(error).__name__}: {error}"[:LONGEST]
    if len(text) > LONGEST:
        return "", f"its text has {len(text):,} characters; at most {LONGEST:,} make sense"
    return text, ""


def main() -> None:
    with suppress(ValueError):  # where a lower limit holds
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    try:
        for request in sys.stdin:
            seconds, *asked = json.loads(request)
            signal.setitimer(signal.ITIMER_PROF, seconds)  # then comes SIGPROF, which ends it
            answer = json.dumps(rendered(*asked))
            signal.setitimer(signal.ITIMER_PROF, 0)
            print(answer, flush=True)
    except MemoryError:
        sys.exit(OUT_OF_MEMORY)


if __name__ == "__main__":
    main()
