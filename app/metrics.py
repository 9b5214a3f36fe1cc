"""Prometheus metrics of a server, under vLLM's names where they mean the same.

    vllm:time_to_first_token_seconds_bucket{model_name="tiny",le="0.05"} 12.0

A counter only grows, a gauge is a number now, a histogram counts observations up to each of its
bounds. The text format: https://prometheus.io/docs/instrumenting/exposition_formats/

The engine thread observes; `render` is asked there, too, between two steps (serve.py).
"""

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from itertools import accumulate
from weakref import WeakKeyDictionary

from batcher import Batcher
from checkpoint.chat import replace_surrogates
from paged import PagedCache
from request import Request, Result

BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
HISTOGRAMS = {
    "time_to_first_token_seconds": "From arrival to the first token.",
    "inter_token_latency_seconds": "Between two tokens of a text; of a round, their mean.",
    "e2e_request_latency_seconds": "From arrival to the last token.",
    "request_queue_time_seconds": "From arrival to admission.",
    "request_prefill_time_seconds": "From admission to the first token.",
    "request_decode_time_seconds": "From the first token to the last.",
}
COUNTERS = {
    "prompt_tokens": "Tokens of the prompts of finished texts.",
    "generation_tokens": "Tokens made.",
    "prefix_cache_queries": "Tokens of prompts that were looked for in the cache.",
    "prefix_cache_hits": "Tokens of prompts that were found there.",
    "num_preemptions": "Texts that had to give their blocks back.",
    "spec_decode_num_drafts": "Rounds with drafts.",
    "spec_decode_num_draft_tokens": "Drafts.",
    "spec_decode_num_accepted_tokens": "Accepted drafts.",
}
Samples = list[tuple[str, str, float]]  # suffix of the name, labels beside the model's, value


class Histogram:
    """Counts observations up to each of BOUNDS, in seconds."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS) + 1)  # the last: above all bounds
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(BOUNDS, value)] += times
        self.sum += value * times

    def samples(self) -> Samples:
        totals = zip((*BOUNDS, "+Inf"), accumulate(self.counts))
        buckets = [("_bucket", f',le="{bound}"', total) for bound, total in totals]
        return [*buckets, ("_sum", "", self.sum), ("_count", "", sum(self.counts))]


class Metrics:
    """Counts what the engine does."""

    def __init__(self, model_name: str, batcher: Batcher):
        self.batcher = batcher
        text = replace_surrogates(model_name)  # a folder's name may have bytes that are no UTF-8
        escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        self.label = f'model_name="{escaped}"'
        self.counts = Counter[str]()  # by COUNTERS
        self.finished = Counter[str](stop=0, length=0)  # by reason
        self.accepted_at = Counter[int]()  # position in the round -> accepted drafts
        self.histograms = {name: Histogram() for name in HISTOGRAMS}
        self.told_at = WeakKeyDictionary[Request, float]()  # when a text had its last token

    # ---- What happens

    def observe(self, new_tokens: dict[Request, list[int]], results: dict[Request, Result]) -> None:
        """A step has made these tokens, and finished these texts."""
        now = time.perf_counter()
        for request, tokens in new_tokens.items():
            self.counts["generation_tokens"] += len(tokens)
            if request in self.told_at:
                interval = (now - self.told_at[request]) / len(tokens)
                self.histograms["inter_token_latency_seconds"].observe(interval, len(tokens))
            else:
                self.counts["prefix_cache_queries"] += request.num_prompt_tokens
                self.counts["prefix_cache_hits"] += request.num_cached_tokens
            self.told_at[request] = now
            drafts, accepted, *_ = request.rounds[-1]
            if drafts:
                self.counts["spec_decode_num_drafts"] += 1
                self.counts["spec_decode_num_draft_tokens"] += drafts
                self.counts["spec_decode_num_accepted_tokens"] += accepted
                self.accepted_at.update(range(accepted))
        for request, result in results.items():
            self._observe_result(request, result)

    def _observe_result(self, request: Request, result: Result) -> None:
        self.counts["prompt_tokens"] += request.num_prompt_tokens
        self.counts["num_preemptions"] += request.num_preemptions
        self.finished[result.finish_reason] += 1
        first = result.seconds_to_first_token
        seconds = {
            "time_to_first_token_seconds": first,
            "e2e_request_latency_seconds": result.seconds,
            "request_queue_time_seconds": result.seconds_queued,
            "request_prefill_time_seconds": first - result.seconds_queued,
            "request_decode_time_seconds": result.seconds - first,
        }
        for name, value in seconds.items():
            self.histograms[name].observe(value)

    # ---- The page /metrics

    def render(self) -> str:
        """All metrics as text."""
        lines = []
        for name, kind, words, samples in self._families():
            lines += [f"# HELP vllm:{name} {words}", f"# TYPE vllm:{name} {kind}"]
            for suffix, labels, value in samples:
                lines.append(f"vllm:{name}{suffix}{{{self.label}{labels}}} {value}")
        return "\n".join(lines) + "\n"

    def _families(self) -> Iterator[tuple[str, str, str, Samples]]:
        """Each metric: its name, kind and meaning, and its samples."""
        gauges = {
            "num_requests_running": ("Texts in the batch.", len(self.batcher.running)),
            "num_requests_waiting": ("Texts in the queue.", len(self.batcher.waiting)),
            "kv_cache_usage_perc": (
                "Share of the cache in use, 0 to 1.",
                cache_share(self.batcher),
            ),
        }
        for name, (words, value) in gauges.items():
            yield name, "gauge", words, [("", "", value)]
        for name, words in COUNTERS.items():
            yield f"{name}_total", "counter", words, [("", "", self.counts[name])]
        words = "Finished texts, by the reason of their end."
        samples = [("", f',finished_reason="{why}"', n) for why, n in self.finished.items()]
        yield "request_success_total", "counter", words, samples
        words = "Accepted drafts, by their place in the round."
        samples = [("", f',position="{place}"', n) for place, n in self.accepted_at.items()]
        yield "spec_decode_num_accepted_tokens_per_pos_total", "counter", words, samples
        for name, words in HISTOGRAMS.items():
            yield name, "histogram", words, self.histograms[name].samples()


def cache_share(batcher: Batcher) -> float:
    """The share of the cache that running texts hold."""
    cache = batcher.runner.cache
    if isinstance(cache, PagedCache):
        return 1 - cache.pool.available / cache.pool.total
    return len(batcher.running) / batcher.max_batch
