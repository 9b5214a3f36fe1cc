"""Everything together: twins share their prompt, stop strings end a request at once, and Ctrl-C everything."""
import pytest
import torch

from engine import Engine, Writer
from pretrained import Model
from request import Request, Settings

PROMPT = "Once upon a time, there was a little"


@pytest.fixture(scope="module")
def model(base) -> Model:
    return Model.load(base, "cpu", torch.float64)


def writers(model: Model, count: int, twins: bool = True, **chosen) -> list[Writer]:
    settings = [Settings(**{**dict(temperature=1.0, seed=i, max_tokens=10, gamma=0), **chosen}) for i in range(count)]
    requests = [Request(model.encode(PROMPT), s, model.ends) for s in settings]
    for request in requests[1:]:
        request.twin = requests[0] if twins else None
    return [Writer(model, request, PROMPT, index=i) for i, request in enumerate(requests)]


@pytest.mark.parametrize("kv", ["paged", "contiguous"])
def test_twins_read_their_prompt_once_and_get_their_own_texts(model, kv):
    read, texts = {}, {}
    for twins in (True, False):
        engine, read[twins] = Engine(model, None, 4 * 60, 60, 4, kv=kv, **({"prefix_cache": False} if kv == "paged" else {})), 0
        step = engine.maker.step

        def counted(work, twins=twins, step=step):
            read[twins] += sum(w.read for w in work)
            return step(work)
        engine.maker.step = counted
        texts[twins] = {r.index: r.tokens for r in engine.serve(writers(model, 4, twins))}
    assert texts[True] == texts[False] and len(set(map(tuple, texts[True].values()))) == 4
    assert read[False] - read[True] == 3 * (len(model.encode(PROMPT)) - 1)


def test_a_stop_string_frees_its_request_while_the_others_go_on(model):
    plain = {r.index: r for r in Engine(model, None, 300, 60, 4).serve(writers(model, 3, max_tokens=20))}
    stop = plain[1].text[4:6]
    engine = Engine(model, None, 300, 60, 4)
    results = {r.index: r for r in engine.serve(writers(model, 3, max_tokens=20, stop=(stop,)))}
    for i, result in results.items():
        at = plain[i].text.find(stop)
        assert result.text == (plain[i].text if at < 0 else plain[i].text[:at]) and (at < 0 or result.finish_reason == "stop")
    assert len(results[1].tokens) < 20 and engine.maker.cache.check()[2] == 0 and not engine.batch.running


def test_ctrl_c_ends_all_with_what_there_is(model):
    engine, calls = Engine(model, None, 300, 60, 2), []
    step = engine.maker.step

    def interrupted(work):
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return step(work)
    engine.maker.step = interrupted
    results = []
    with pytest.raises(KeyboardInterrupt):                                              # which then goes on its way
        for result in engine.serve(writers(model, 3, twins=False)):
            results.append(result)
    assert [r.finish_reason for r in results] == ["interrupted"] * 3 and [len(r.tokens) for r in results] == [4, 4, 0]
    assert engine.maker.cache.check()[2] == 0


def test_blocks_are_as_many_as_can_be_needed_or_as_memory_holds(model):
    token = 2 * 2 * 2 * 6 * 8                                                            # bytes, in float64
    assert Engine(model, None, 100, 50, 2).maker.cache.pool.total == 7 + 2
    assert Engine(model, None, 100, 50, 2, kv_memory=token * 16 * 5 + 7).maker.cache.pool.total == 5
    both = Engine(model, model, 100, 50, 2, kv_memory=token * 16 * 10)
    assert [cache.pool.total for cache in both.caches] == [5, 5] and sum(cache.bytes for cache in both.caches) == token * 16 * 10
    assert both.describe() == "keys and values: 5 blocks of 16 tokens, 0.1 MB"
    assert Engine(model, None, 100, 50, 2, kv="contiguous").describe() == "keys and values: rows of 50 tokens, 0.0 MB"


def test_what_does_not_go_together(model):
    for wrong, says in ((dict(kv="tree"), "kv is 'tree'"), (dict(kv="contiguous", kv_memory=0.5), "kv_memory is for the paged cache"),
                        (dict(use_cache=False, max_batch=2), "without a cache there are no drafts, no batches"), (dict(kv_bits=5), "kv_bits is 5"),
                        (dict(kv_memory=float("inf")), "is inf bytes, and"), (dict(kv_memory=1e308), r"1e\+308 bytes, and .* are free"),
                        (dict(kv="contiguous", max_batch=10**12), "1000000000000 rows of 50 tokens take"), (dict(use_cache=False, kv_bits=8), "leave out --draft, --prompts and --kv-bits")):
        with pytest.raises(ValueError, match=says):
            Engine(model, None, 100, 50, **wrong)
