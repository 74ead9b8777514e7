"""Seeds are frozen numbers of what they are for, and differ wherever that differs."""

from __future__ import annotations

import itertools

import numpy as np

from gspo.seeding import derive_seed, permutation


def test_seeds_are_the_same_in_every_version():
    assert derive_seed(0, "rollout", 3, 1) == 8862366475676394405
    assert permutation(derive_seed(0, "shuffle"), 8).tolist() == [1, 5, 2, 3, 6, 4, 7, 0]


def test_seeds_differ_by_run_purpose_and_every_counter():
    calls = [
        (run, purpose, *counters)
        for run, purpose in itertools.product((0, 1, 11), ("token", "tokens"))
        for counters in [(), (1,), (11,), (1, 1), (1, 11), (11, 1), (111,), (1, 1, 1)]
    ]
    assert len({derive_seed(*call) for call in calls}) == len(calls)


def test_seeds_have_63_bits():
    seeds = [derive_seed(0, "bits", number) for number in range(64)]
    assert max(seeds) < 2**63 and max(seeds) > 2**62  # half of all have the highest bit: none of 64 is 2**-64


def test_both_halves_of_a_seed_decide_the_order():
    orders = {tuple(permutation(seed, 50)) for seed in (5, 5 + 2**32, 5 + 2**40, 6)}
    assert len(orders) == 4
    assert np.array_equal(np.sort(permutation(5, 50)), np.arange(50))
