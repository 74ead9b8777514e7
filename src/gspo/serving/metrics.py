"""Counts of a server, in the text form that Prometheus reads."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter

from gspo.serving.jobs import JobCounts

BUCKETS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


class Histogram:
    """How many seconds something took, by bucket."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BUCKETS) + 1)
        self._sum = 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect_left(BUCKETS, seconds)] += 1
        self._sum += seconds

    def lines(self, name: str) -> list[str]:
        total, lines = 0, []
        for limit, count in zip((*map(str, BUCKETS), "+Inf"), self._counts):
            total += count
            lines.append(f'{name}_bucket{{le="{limit}"}} {total}')
        return [*lines, f"{name}_sum {self._sum:.6f}", f"{name}_count {total}"]


class RequestTimes:
    """Measures one request, from here on."""

    def __init__(self, to_first_token: Histogram, to_end: Histogram) -> None:
        self._to_first_token: Histogram | None = to_first_token
        self._to_end = to_end
        self._start = time.monotonic()

    def first_token(self) -> None:
        """A streamed answer has tokens to show; only the first call counts."""
        if self._to_first_token is not None:
            self._to_first_token.add(time.monotonic() - self._start)
            self._to_first_token = None

    def end(self) -> None:
        """The answer is complete."""
        self._to_end.add(time.monotonic() - self._start)


class ServerMetrics:
    """What a server has done since its start."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()  # by endpoint and status
        self._to_first_token, self._to_end = Histogram(), Histogram()

    def start_request(self) -> RequestTimes:
        return RequestTimes(self._to_first_token, self._to_end)

    def text(self, counts: JobCounts, num_open: int, num_slots: int) -> str:
        """All metrics, as a page."""
        page = ["# TYPE gspo_requests_total counter"]
        for (endpoint, status), count in sorted(self.requests.items()):
            page.append(f'gspo_requests_total{{endpoint="{endpoint}",status="{status}"}} {count}')
        for name, kind, value in (
            ("gspo_prompt_tokens_total", "counter", counts.prompt_tokens),
            ("gspo_generation_tokens_total", "counter", counts.generated_tokens),
            ("gspo_responses_cancelled_total", "counter", counts.cancelled),
            ("gspo_engine_failures_total", "counter", counts.failures),
            ("gspo_responses_running", "gauge", min(num_open, num_slots)),
            ("gspo_responses_waiting", "gauge", max(0, num_open - num_slots)),
        ):
            page += [f"# TYPE {name} {kind}", f"{name} {value}"]
        for name, histogram in (
            ("gspo_time_to_first_token_seconds", self._to_first_token),
            ("gspo_request_seconds", self._to_end),
        ):
            page += [f"# TYPE {name} histogram", *histogram.lines(name)]
        return "\n".join(page) + "\n"
