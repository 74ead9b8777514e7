"""Packed micro-batches: every real token once, and the prompt of a group once for all its responses.

The tokens of a micro-batch form one row without padding, [1, N]. All layers except attention work token by token;
attention (attention.py) splits the row into its sequences. A response's last token is omitted: it predicts nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from gspo.kernels.cpu_attention import PackedSequences
from gspo.kernels.device_memory import upload
from gspo.kernels.flash_packed import Spans
from gspo.kernels.ragged import flat, ranges, repeated
from gspo.training.parallel.sequence import SequenceRanks
from gspo.types import TrainBatch

# A block with fewer attention scores than this is not split: another call would cost more.
CHEAP_SCORES = 1 << 20
# A block with more scores, whose rows need a mask each, is split by group, whose rows share one.
MASKED_SCORES = 1 << 26
# Makes a kernel's argument on a device from sequences (start, length, start of the prefix, its length).
SpansOf = Callable[[Sequence[tuple[int, int, int, int]], torch.device | str], Spans | PackedSequences]


class _Pick(torch.autograd.Function):
    """Rows `index` of x. Where rows repeat, as padding, only those at `places` receive a gradient.

    `index[places]` has no row twice, so the gradient is a copy and not a sum: the same bits on every device.
    """

    @staticmethod
    def forward(ctx, x: Tensor, index: Tensor, places: Tensor | None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.num_rows, ctx.index, ctx.places = x.shape[0], index, places
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        index, places = ctx.index, ctx.places
        if places is not None:
            index, grad = index.index_select(0, places), grad.index_select(0, places)
        out = grad.new_zeros(ctx.num_rows, *grad.shape[1:])
        return out.index_copy_(0, index, grad), None, None


@dataclass(frozen=True, slots=True)
class Span:
    """Sequences of packed tokens, and their padded form [rows, width]. Sequence i has lengths[i] tokens from starts[i]."""

    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    index: Tensor  # [rows · width] packed token of every place in the padded form; 0 on padding
    places: Tensor | None  # padded places that hold a token; None: all
    contiguous: bool  # the padded form is a slice of the packed one

    @staticmethod
    def of(starts: Sequence[int], lengths: Sequence[int], device: torch.device | str) -> Span:
        width = max(lengths)
        offsets = torch.arange(width)
        real = offsets < torch.tensor(lengths)[:, None]
        index = torch.where(real, torch.tensor(starts)[:, None] + offsets, 0).flatten()
        full = min(lengths) == width
        follows = all(s + n == t for s, n, t in zip(starts, lengths, starts[1:]))
        places = None if full else real.flatten().nonzero()[:, 0].to(device)
        return Span(tuple(starts), tuple(lengths), index.to(device), places, full and follows)

    @property
    def num_rows(self) -> int:
        return len(self.lengths)

    @property
    def width(self) -> int:
        return max(self.lengths)

    def pad(self, x: Tensor) -> Tensor:
        """[N, …] to [rows, width, …]; padding holds some token's values."""
        if self.contiguous:
            out = x.narrow(0, self.starts[0], self.num_rows * self.width)
        else:
            out = _Pick.apply(x, self.index, self.places)
        return out.unflatten(0, (self.num_rows, self.width))

    def unpad(self, x: Tensor) -> Tensor:
        """[rows, width, …] to the real tokens, one sequence after another."""
        flat = x.flatten(0, 1)
        return flat if self.places is None else _Pick.apply(flat, self.places, None)


@dataclass(frozen=True, slots=True)
class Block:
    """Sequences that attend in one call: each causally to itself, and fully to its prefix if it has one."""

    queries: Span
    prefix: Span | None = None
    prefix_of: Tensor | None = None  # [rows] row of `prefix` that each sequence continues
    repeats: int | None = None  # every prefix serves this many neighbouring rows
    masks: dict[int | None, Tensor] = field(default_factory=dict, hash=False, compare=False)

    def expand_prefix(self, x: Tensor) -> Tensor:
        """The prefix of every sequence, [rows, prefix width, …]."""
        assert self.prefix is not None and self.prefix_of is not None
        padded = self.prefix.pad(x)
        if self.repeats is None:
            return padded.index_select(0, self.prefix_of)
        return padded[:, None].expand(-1, self.repeats, *padded.shape[1:]).flatten(0, 1)

    def mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """Additive mask [rows or 1, 1, queries, keys]. Keys are the padded prefix, then the sequence."""
        if window not in self.masks:
            self.masks[window] = self._build_mask(window, dtype)
        return self.masks[window]

    def _build_mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        device = self.queries.index.device
        query = torch.arange(self.queries.width, device=device)[:, None]
        distance = query - torch.arange(self.queries.width, device=device)
        visible = (distance >= 0) & (True if window is None else distance < window)
        visible = visible[None]
        if self.prefix is not None and self.prefix_of is not None:
            size = torch.tensor(self.prefix.lengths, device=device)
            size = size[:1] if len(set(self.prefix.lengths)) == 1 else size[self.prefix_of]
            key, size = torch.arange(self.prefix.width, device=device), size[:, None, None]
            before = (key < size).expand(-1, self.queries.width, -1)
            if window is not None:
                before = before & (query + size - key < window)
            visible = torch.cat([before, visible.expand(len(size), -1, -1)], dim=-1)
        return torch.zeros(visible.shape, dtype=dtype, device=device).masked_fill_(~visible, -torch.inf)[:, None]


@dataclass(frozen=True, slots=True)
class Layout:
    """The positions of a packed micro-batch's tokens and which tokens each attends to.

    `own` are the packed tokens that predict one trained token. `shared` are the last tokens of prompts that predict the
    first token of several responses; `shared_by` is the index into `shared` of each such response. The head's input are
    the hidden states of `own`, then those of `shared[shared_by]`. On `sequence` ranks these three count from the first
    token of this rank's `part`.
    """

    position_ids: Tensor  # [1, N]
    blocks: tuple[Block, ...]  # in packed order
    group: Tensor  # [N] prompt of a token
    response: Tensor  # [N] response of a token; -1 in a shared prompt
    own: Tensor
    shared: Tensor
    shared_by: Tensor
    spans: Spans | PackedSequences | None = None  # for kernels that process all sequences in one call
    sequence: SequenceRanks | None = None  # the ranks that share these tokens
    cache: dict[object, object] = field(default_factory=dict, hash=False, compare=False)  # masks of kernels

    @property
    def arguments(self) -> dict[str, object]:
        """Keyword arguments of the decoder that attention needs."""
        own: dict[str, object] = {"layout": self} if self.spans is None else {"spans": self.spans}
        return own if self.sequence is None else {**own, "sequence": self.sequence, "num_tokens": self.num_tokens}

    @property
    def num_tokens(self) -> int:
        return self.position_ids.shape[1]

    @property
    def part(self) -> slice:
        """The tokens that this rank runs through the layers."""
        return slice(None) if self.sequence is None else self.sequence.part(self.num_tokens)

    def forget_masks(self) -> None:
        """Free the masks, which may be larger than the rest of the micro-batch."""
        self.cache.clear()
        for block in self.blocks:
            block.masks.clear()

    def predicting(self, hidden: Tensor) -> Tensor:
        """The hidden states, of [N, H], that predict a response token."""
        own = _Pick.apply(hidden, self.own, None)
        if not len(self.shared):
            return own
        return torch.cat([own, _Pick.apply(hidden, self.shared, None).index_select(0, self.shared_by)])


@dataclass(slots=True)
class _Sequence:
    """Consecutive packed tokens: a whole row, a prompt that several responses share, or one of those responses."""

    tokens: tuple[int, ...]
    group: int
    row: int = -1  # its row in the batch; -1 for a shared prompt
    num_prompt: int = 0
    first_position: int = 0
    start: int = 0


def pack(
    batch: TrainBatch, rows: Sequence[int], device: torch.device | str, *, share: bool, spans_of: SpansOf | None = None
) -> tuple[Tensor, Layout, Tensor, Tensor]:
    """Token ids [1,N] of these rows, their layout, and for each predicting token its target and slot in a flat [rows, T].

    A token that is not trained on is not predicted.
    """
    prompts, answers = _sequences(batch, rows, share)
    whole, spread = _cut(prompts, None), _cut(answers, [len(p.tokens) for p in prompts])
    ordered = [s for block in (*whole, *spread) for s in block]
    end = 0
    for sequence in ordered:
        sequence.start, end = end, end + len(sequence.tokens)
    sizes = [len(s.tokens) for s in ordered]
    ids = upload(flat(s.tokens for s in ordered), device)
    positions = ranges([s.first_position for s in ordered], sizes)
    blocks = []
    if spans_of is None:
        blocks = [_block(b, None, device) for b in whole] + [_block(b, prompts, device) for b in spread]
    owners, readers = repeated([s.group for s in ordered], sizes), repeated([s.row for s in ordered], sizes)
    own, shared, shared_by = _predictions(batch, ordered, answers)
    targets, slots = _targets(batch, rows, ordered, answers)
    trained = trained_slots(batch, rows, slots)
    own, shared_by = own[trained[: len(own)]], shared_by[trained[len(own) :]]
    layout = Layout(
        position_ids=upload(positions[None], device),
        blocks=tuple(blocks),
        group=upload(owners, device),
        response=upload(readers, device),
        own=upload(own, device),
        shared=upload(torch.tensor(shared, dtype=torch.long), device),
        shared_by=upload(shared_by, device),
        spans=None if spans_of is None else spans_of([_extent(s, prompts) for s in ordered], device),
    )
    return ids[None], layout, upload(targets[trained], device), upload(slots[trained], device)


def share_tokens(layout: Layout, sequence: SequenceRanks) -> tuple[Layout, Tensor]:
    """The layout of this rank's part of the tokens, and which of the predictions (`own`, then `shared_by`) are in it."""
    start, end = sequence.bounds(layout.num_tokens)
    own, shared = ((start <= x) & (x < end) for x in (layout.own, layout.shared))
    by = shared[layout.shared_by]
    return replace(
        layout,
        sequence=sequence,
        own=layout.own[own] - start,
        shared=layout.shared[shared] - start,
        shared_by=(shared.cumsum(0) - 1)[layout.shared_by[by]],
    ), torch.cat([own, by])


def trained_slots(batch: TrainBatch, rows: Sequence[int], slots: Tensor) -> Tensor:
    """Which of these indices into a flat [rows, T] are trained tokens; the others need no log-prob."""
    return batch.mask[list(rows)].flatten()[slots].bool()


def _sequences(batch: TrainBatch, rows: Sequence[int], share: bool) -> tuple[list[_Sequence], list[_Sequence]]:
    """Sequences without a prefix (shared prompts and whole rows), and the responses that continue a shared prompt."""
    prompts, answers = [], []
    for group, of_group in enumerate(batch.by_prompt(rows) if share else [[row] for row in rows]):
        prompt = batch.prompt_ids[of_group[0]]
        size = len(prompt)
        if len(of_group) == 1:
            whole = prompt + batch.response_ids[of_group[0]][:-1]
            prompts.append(_Sequence(whole, group, of_group[0], num_prompt=size))
            continue
        prompts.append(_Sequence(prompt, group, num_prompt=size))
        answers += [
            _Sequence(batch.response_ids[row][:-1], group, row, first_position=size)
            for row in of_group
            if batch.response_ids[row]  # an empty one has nothing to predict
        ]
    return prompts, answers


def _extent(sequence: _Sequence, prompts: Sequence[_Sequence]) -> tuple[int, int, int, int]:
    """Start and length of a sequence and of its prefix."""
    own = sequence.start, len(sequence.tokens)
    if sequence.row < 0 or sequence.num_prompt:
        return *own, 0, 0
    prompt = prompts[sequence.group]
    return *own, prompt.start, len(prompt.tokens)


def _predictions(
    batch: TrainBatch, ordered: Sequence[_Sequence], answers: Sequence[_Sequence]
) -> tuple[Tensor, list[int], Tensor]:
    """`own`, `shared` and `shared_by` of the layout."""
    firsts: list[int] = []
    counts: list[int] = []
    last: dict[int, int] = {}  # group → packed index of its shared prompt's last token
    for s in ordered:
        if s.row < 0:
            last[s.group] = s.start + len(s.tokens) - 1
            continue
        first, skipped = _first_prediction(s)
        firsts.append(first)
        counts.append(len(batch.response_ids[s.row]) - skipped)
    order = {group: i for i, group in enumerate(last)}
    shared_by = torch.tensor([order[s.group] for s in answers], dtype=torch.long)
    return ranges(firsts, counts), list(last.values()), shared_by


def _targets(
    batch: TrainBatch, rows: Sequence[int], ordered: Sequence[_Sequence], answers: Sequence[_Sequence]
) -> tuple[Tensor, Tensor]:
    """The tokens that `own` and then `shared[shared_by]` predict, and their indices in a flat [rows, T]."""
    width = batch.mask.shape[1]
    place = {row: i * width for i, row in enumerate(rows)}
    rest = [(s.row, _first_prediction(s)[1]) for s in ordered if s.row >= 0]
    pieces = [(row, skipped, batch.response_ids[row][skipped:]) for row, skipped in rest]
    pieces += [(s.row, 0, batch.response_ids[s.row][:1]) for s in answers]
    slots = ranges([place[row] + skipped for row, skipped, _ in pieces], [len(tokens) for *_, tokens in pieces])
    return flat(tokens for *_, tokens in pieces), slots


def _first_prediction(s: _Sequence) -> tuple[int, int]:
    """The first predicting token of a sequence, and how many response tokens it skips.

    A response's first token is predicted by its prompt: in the same sequence, or in a shared one, which is skipped.
    """
    return (s.start + s.num_prompt - 1, 0) if s.num_prompt else (s.start, 1)


def _cut(sequences: list[_Sequence], prefixes: list[int] | None) -> list[list[_Sequence]]:
    """Sequences in blocks: a single one, unless its padding or masks would be costly."""
    sequences = [s for s in sequences if s.tokens]  # a response of one token has no queries
    if not sequences:
        return []
    if not _costly(sequences, prefixes):
        return [sequences]
    by_group: dict[int, list[_Sequence]] = {}
    for s in sequences:
        by_group.setdefault(s.group if prefixes is not None else 0, []).append(s)
    out: list[list[_Sequence]] = []
    for members in by_group.values():
        out += _cut_by_length(members) if _costly(members, prefixes) else [members]
    return out


def _cut_by_length(sequences: list[_Sequence]) -> list[list[_Sequence]]:
    """Blocks of similar lengths: padding adds at most half to a sequence."""
    out: list[list[_Sequence]] = []
    for s in sorted(sequences, key=lambda s: -len(s.tokens)):
        if out and 1.5 * len(s.tokens) > len(out[-1][0].tokens):
            out[-1].append(s)
        else:
            out.append([s])
    return out


def _costly(sequences: list[_Sequence], prefixes: list[int] | None) -> bool:
    before = [0 if prefixes is None else prefixes[s.group] for s in sequences]
    lengths = [len(s.tokens) for s in sequences]
    padded = len(lengths) * max(lengths) * (max(before) + max(lengths))
    real = sum(n * (p + n) for n, p in zip(lengths, before))
    wasteful = padded > CHEAP_SCORES and padded > 1.5 * real
    return wasteful or (len(set(before)) > 1 and padded > MASKED_SCORES)


def _block(sequences: list[_Sequence], prompts: list[_Sequence] | None, device: torch.device | str) -> Block:
    queries = Span.of([s.start for s in sequences], [len(s.tokens) for s in sequences], device)
    if prompts is None:
        return Block(queries)
    groups = list(dict.fromkeys(s.group for s in sequences))
    used = [prompts[g] for g in groups]
    prefix = Span.of([p.start for p in used], [len(p.tokens) for p in used], device)
    row = {group: i for i, group in enumerate(groups)}
    prefix_of = [row[s.group] for s in sequences]
    repeats = len(sequences) // len(groups)
    in_order = prefix_of == [i for i in range(len(groups)) for _ in range(repeats)]
    return Block(queries, prefix, torch.tensor(prefix_of, device=device), repeats if in_order else None)
