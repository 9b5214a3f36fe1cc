"""What is told of drafts: figures of rounds that are known, and one run of all."""

import json
from types import SimpleNamespace
from unittest import mock

import pytest

from errors import UserError
from measure import drafts
from measure.sizes import Sizes
from request import RoundStats


def told(seconds: float, rounds=(), draft_seconds: float = 0.0, tokens=(1, 2)) -> SimpleNamespace:
    stats = [RoundStats(*numbers) for numbers in rounds]
    num_drafts = sum(stat.num_drafts for stat in stats)
    return SimpleNamespace(
        seconds_per_token=seconds,
        rounds=stats,
        draft_seconds=draft_seconds,
        num_drafts=num_drafts,
        tokens=list(tokens),
    )


def test_figures_of_known_rounds():
    """Of 4 first drafts 3 were accepted, of the 3 second ones 1."""
    texts = [
        (told(1.0), told(0.5, [(2, 2), (2, 0)], draft_seconds=0.8)),
        (told(3.0), told(1.0, [(2, 1), (2, 1)], draft_seconds=1.2, tokens=(1, 3))),
    ]
    row = drafts.row_of(2, 0.0, texts)
    assert row["gamma"] == "2"
    assert row["acceptance"] == "0.75 0.33"
    assert row["tokens_per_round"] == 2.0
    assert row["speed_up"] == 2.5
    assert row["draft_cost"] == pytest.approx((0.2 + 0.1) / 2)
    assert (row["same_texts"], row["texts"]) == (1, 2)
    assert "same_texts" not in drafts.row_of(2, 1.0, texts)
    assert drafts.row_of(None, 1.0, texts)["gamma"] == "auto: 2.0"


@pytest.mark.slow
def test_every_draft_is_measured_at_both_temperatures_in_all_widths(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": "Once upon a time", "kind": "story"}) + "\n")
    sizes = Sizes(gammas=(2,), num_tokens=8)
    rows = drafts.drafts(sizes, "tiny", ["tiny-eagle", "ngram"], file)
    assert len(rows) == 3 * 2 * 2 * 2
    row = rows["tiny, float32, story, tiny-eagle, T 0, 2"]
    assert row["same_texts"] == row["texts"] == 1
    assert row["tokens_per_round"] > 1 and row["speed_up"] > 0 and row["draft_cost"] > 0
    with mock.patch.object(drafts, "load_draft", wraps=drafts.load_draft) as load:
        names = drafts.drafts(sizes, "tiny", ["tiny-eagle"], file, 4)
    assert [call.kwargs for call in load.call_args_list] == [{"bits": 4}] * 3
    assert len(names) == 12 and all(", tiny-eagle, --draft-bits 4, T " in name for name in names)
    for line in ('{"prompt": "b", "seed": 1}', '{"prompt": "b", "kind": 1}', '{"prompt": 1}', "{"):
        file.write_text('{"prompt": "a"}\n' + line)
        with pytest.raises(UserError, match="line 2"):
            drafts.prompts_of(file)
    file.write_bytes(b'{"prompt": "\xff"}')
    with pytest.raises(UserError, match="is not UTF-8"):
        drafts.prompts_of(file)
    file.write_text("")
    with pytest.raises(UserError, match="no prompts"):
        drafts.prompts_of(file)


def test_only_a_newline_ends_a_line_of_prompts(tmp_path):
    """JSON may hold other characters that end a line for Python."""
    file = tmp_path / "prompts.jsonl"
    prompts = ["a\u2028b", "c\x85"]
    lines = [json.dumps({"prompt": prompt}, ensure_ascii=False) for prompt in prompts]
    file.write_text("\r\n\n".join(lines) + "\n", encoding="utf-8")
    assert drafts.prompts_of(file) == {"": prompts}
