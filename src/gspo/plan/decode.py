"""The time of generation: one decode step, and a batch of responses of different lengths."""

from __future__ import annotations

from dataclasses import dataclass

from gspo.models.shape import ModelShape
from gspo.plan.constants import COLLECTIVE_SHARE, HOP_S, ROW_PASSES, SAMPLING_PASSES, TRAFFIC_PASSES, Device
from gspo.plan.lengths import Lengths
from gspo.plan.seconds_by_part import SecondsByPart

WEIGHTS, CACHE, LAUNCH = "reading weights", "reading the KV cache", "launching kernels"
PRODUCTS, HEAD, EXCHANGE = ("matrix products of decoding", "output head and sampling", "tensor-parallel communication")
TAIL, PREFILL = "waiting for the longest responses", "prefill"
TAIL_SHARE = 0.25  # an engine with a smaller share of its first rows left is waiting for its last responses


@dataclass(frozen=True)
class DecodeCost:
    """Seconds of decoding on one engine, a copy of the model over `tp` devices."""

    shape: ModelShape
    device: Device
    tp: int = 1
    eager: bool = False

    def step(self, rows: float, context: float) -> SecondsByPart:
        """Seconds of one decode step of `rows` rows with `context` tokens before each on average.

        Launching kernels takes a time that does not grow with the batch. To it comes the larger of bytes over bandwidth
        (weights once; cache, intermediate results and a fixed time for each row) and operations over rate, then the
        output head in float32 and sampling.
        """
        s, d = self.shape, self.device
        size, rate = d.number_bytes, self.tp * d.reached_bandwidth
        weights = s.read_bytes(rows, size) / rate
        row_bytes = context * s.kv_bytes(size) + ROW_PASSES * s.layers * s.kept_bytes(size)
        cache = rows * (row_bytes / rate + s.layers * d.row_layer_s / self.tp)
        operations = rows * 2 * s.active_body + s.attention_operations(rows * context)
        products = operations / (self.tp * d.matmul)
        parts = SecondsByPart()
        parts[LAUNCH] = s.layers * (d.eager_layer_s if self.eager else d.decode_layer_s)
        if products > weights + cache:
            parts[PRODUCTS] = products
        else:
            parts[WEIGHTS], parts[CACHE] = weights, cache
        head = 2.0 * rows * s.head_parameters / (self.tp * d.head_rate)
        parts[HEAD] = head + SAMPLING_PASSES * rows * s.vocab * 4 / rate
        if self.tp > 1:
            sent = 2 * rows * s.hidden * size / (d.link * COLLECTIVE_SHARE)
            parts[EXCHANGE] = 2 * s.layers * (HOP_S + sent)
        if self.eager and parts[LAUNCH] > parts.total - parts[LAUNCH]:
            # The device waits for the host, which launches kernels while it computes.
            return SecondsByPart({LAUNCH: parts[LAUNCH]})
        return parts

    def prefill_seconds(self, texts: float, tokens: float, before: float = 0.0) -> float:
        """Seconds to compute the cache of `texts` texts of `tokens` tokens, each after `before` tokens that have theirs."""
        s, d = self.shape, self.device
        pairs = tokens * before + tokens**2 / 2
        operations = texts * (tokens * 2 * s.active_body + s.attention_operations(pairs) + 2 * s.head_parameters)
        passes = texts * tokens * s.layers * s.kept_bytes(d.number_bytes) * TRAFFIC_PASSES if d.is_gpu else 0.0
        return (operations / d.matmul + passes / d.reached_bandwidth) / self.tp


def generate(
    engine: DecodeCost, rows: float, num_engines: int, slots: int, lengths: Lengths, prompt: float, group: int
) -> SecondsByPart:
    """Seconds until each of `num_engines` engines has generated `rows` responses, `slots` of them at a time.

    With more responses than slots an engine runs full, then drains: the rest of a response observed at a random moment
    has the survival function ∫S/mean (renewal theory). A length counts with the probability that some engine still has
    a response of that length.
    """
    parts = SecondsByPart({PREFILL: engine.prefill_seconds(rows / group, prompt)})
    start = min(rows, float(slots))
    if lengths.constant:
        waves = -(-int(max(1, rows)) // slots) if rows > slots else 1
        for x, width in lengths.grid:
            parts.add(engine.step(start, prompt + x), waves * width)
        return parts
    survival = [lengths.survival(x) for x, _ in lengths.grid]
    if rows > slots:
        full = max(0.0, rows * lengths.mean / slots - lengths.residual_mean)
        parts.add(engine.step(start, prompt + lengths.residual_mean), full)
        survival = list(lengths.residuals)
    for (x, width), share in zip(lengths.grid, survival):
        waited = 1 - (1 - share) ** max(1.0, start * num_engines)
        step = engine.step(max(1.0, start * share), prompt + x)
        if share < TAIL_SHARE:
            parts.add({TAIL: step.total}, waited * width)
        else:
            parts.add(step, waited * width)
    return parts


def again(engine: DecodeCost, rows: float, prompt: float, lengths: Lengths, groups: float) -> float:
    """Seconds to compute the caches of `rows` unfinished responses of `groups` groups again after a weight update."""
    written = engine.prefill_seconds(rows, lengths.residual_mean, prompt)  # as many tokens on average as are left
    return engine.prefill_seconds(groups, prompt) + written


def steady(engine: DecodeCost, rows: float, prompt: float, lengths: Lengths, group: int) -> SecondsByPart:
    """Seconds of a decode step of one engine that always generates `rows` responses, prefill of new prompts included."""
    parts = engine.step(rows, prompt + lengths.residual_mean)
    parts.add({PREFILL: engine.prefill_seconds(rows / lengths.mean / group, prompt)})
    return parts
