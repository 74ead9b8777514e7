"""The counter-based uniforms: exact against a reference in Python integers, and statistically flat."""

from __future__ import annotations

import math

import torch

from gspo.rollout.counter_noise import sequence_key, uniform


def _reference(key: int, position: int) -> float:
    x = (key + position * 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return ((x ^ (x >> 31)) >> 11) / 2**53


def _chi_square_z(counts: torch.Tensor) -> float:
    """Chi-square of equal expected counts, as standard deviations from its mean."""
    expected = counts.sum() / counts.numel()
    freedom = counts.numel() - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom))


def test_equals_the_hash_in_exact_integers():
    keys = [sequence_key(s, g, r) for s in (0, 7) for g in (0, 1, 10**9) for r in (0, 3)] + [0, 1, 2**63 - 1]
    positions = [0, 1, 2, 1000, 2**40]
    got = uniform(torch.tensor(keys)[:, None], torch.tensor(positions)).tolist()
    assert got == [[_reference(k, p) for p in positions] for k in keys]


def test_lies_in_the_half_open_unit_interval():
    values = uniform(torch.arange(100_000), torch.tensor(3))
    assert values.dtype == torch.float64
    assert values.min() >= 0.0 and values.max() < 1.0


def test_keys_differ_by_seed_submission_and_response():
    keys = {sequence_key(s, g, r) for s in range(10) for g in range(10) for r in range(10)}
    assert len(keys) == 1000


def test_is_flat_along_positions_and_along_responses():
    keys = torch.tensor([sequence_key(1, g, r) for g in range(250) for r in range(8)])
    values = uniform(keys[:, None], torch.arange(100))  # 200,000 numbers
    assert abs(_chi_square_z(torch.histc(values.flatten(), 1000, 0, 1))) < 4
    for one_axis in (values[0:20].flatten(), values[:, 0], values[:, 99]):
        assert abs(_chi_square_z(torch.histc(one_axis, 20, 0, 1))) < 4


def test_neighbours_are_independent():
    keys = torch.tensor([sequence_key(1, g, r) for g in range(250) for r in range(8)])
    values = uniform(keys[:, None], torch.arange(100))
    pairs = {
        "positions": (values[:, :-1], values[:, 1:]),
        "responses": (values[:-1], values[1:]),
        "low keys": (uniform(torch.arange(50_000), torch.tensor(0)), uniform(torch.arange(50_000), torch.tensor(1))),
    }
    for name, (a, b) in pairs.items():
        a, b = a.flatten(), b.flatten()
        cells = torch.bincount((a * 16).long() * 16 + (b * 16).long(), minlength=256).double()
        assert abs(_chi_square_z(cells)) < 4, name
        assert abs(torch.corrcoef(torch.stack([a, b]))[0, 1]) < 4 / math.sqrt(len(a)), name
