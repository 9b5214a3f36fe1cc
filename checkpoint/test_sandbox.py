"""A template's bounds are told by name, and the next text is right."""

import pytest

from checkpoint import sandbox
from checkpoint.sandbox import LONGEST, render

NESTED = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
TWICE = "{% macro a(n) %}{% if n %}{{ a(n - 1) }}{{ a(n - 1) }}{% endif %}{% endmacro %}{{ a(60) }}"
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}xxxx{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    "source, says",
    [
        ("{{ 'x' * 10**10 }}", "is repeated to more than"),
        ("{{ [1] * 10**9 }}", "is repeated to more than"),
        ("{{ 10 ** (10 ** 8) // 3 }}", "is too large"),
        (NESTED, "it computes for more than 0.2 s"),
        (TWICE, "it computes for more than 0.2 s"),
        (ENDLESS, "more than "),
        ("{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "RecursionError"),
        (f"{{{{ 'x' * {LONGEST} }}}}y", f"more than {LONGEST:,} characters"),
        ("{% for i in range(100001) %}{% endfor %}", "OverflowError: Range too big"),
    ],
)
def test_each_bound_is_told_by_name_and_the_next_text_is_right(source, says, monkeypatch):
    monkeypatch.setattr(sandbox, "SECONDS", 0.2)
    text, problem = render(source, {})
    assert says in problem[:100] and text == ""
    assert render("{{ a }}b", {"a": 1}) == ("1b", "")
    assert render(f"{{{{ 'é' * {LONGEST} }}}}", {}) == ("é" * LONGEST, "")
    assert render("{{ 2.5 * 2 ** 10 }}", {}) == ("2560.0", "")
