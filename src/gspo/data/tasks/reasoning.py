"""Logic and word problems for `mixed`: six generated families in three levels, with integer answers."""

from __future__ import annotations

import itertools
import random

from gspo.data.rows import Row
from gspo.data.tasks.generated import Family, Problem, generate_rows

_NAMES = ("Ana", "Ben", "Chloe", "Dan", "Ema", "Finn", "Gita", "Hugo")


def ages(rng: random.Random, level: int) -> Problem:
    old, young = rng.sample(_NAMES, 2)
    age, gap, years = rng.randint(4, 15 * level), rng.randint(2, 9 * level), rng.randint(2, 10)
    total = 2 * (age + years) + gap
    question = (
        f"{old} is {gap} years older than {young}. In {years} years their ages will add up to {total}. "
        f"How old is {young} now?"
    )
    steps = f"Now they add up to {total} - 2 * {years} = {total - 2 * years}; minus {gap}, halved: {age}."
    return Problem(question, str(age), steps)


def race(rng: random.Random, level: int) -> Problem:
    runners = rng.sample(_NAMES, 3 + level)
    clues = [f"{a} finished right before {b}." for a, b in itertools.pairwise(runners)]
    rng.shuffle(clues)
    place = rng.randint(1, len(runners))
    question = f"{len(runners)} runners finished a race. {' '.join(clues)} Which place did {runners[place - 1]} take?"
    return Problem(question, str(place), f"The order is {', '.join(runners)}.")


def boxes(rng: random.Random, level: int) -> Problem:
    counts = {name: rng.randint(2, 9) for name in ("red", "blue", "green")[: 2 + (level > 1)]}
    text = ", ".join(f"the {name} box holds {n} balls" for name, n in counts.items())
    moves, trail = [], []
    for _ in range(2 * level):
        source = rng.choice([name for name, n in counts.items() if n])
        target = rng.choice([name for name in counts if name != source])
        n = rng.randint(1, counts[source])
        counts[source] -= n
        counts[target] += n
        moves.append(f"{n} {'goes' if n == 1 else 'go'} from {source} to {target}")
        trail.append(f"{source} {counts[source]}, {target} {counts[target]}")
    chosen = rng.choice(list(counts))
    question = f"At first {text}. Then {'; '.join(moves)}. How many balls are in the {chosen} box now?"
    return Problem(question, str(counts[chosen]), "; ".join(trail) + ".")


def lamps(rng: random.Random, level: int) -> Problem:
    count = 4 + 2 * level
    pressed = [rng.randint(1, count) for _ in range(3 * level + 1)]
    on = sorted(n for n in set(pressed) if pressed.count(n) % 2)
    question = (
        f"{count} lamps are numbered 1 to {count} and all are off. These switches are pressed in turn: "
        f"{', '.join(map(str, pressed))}. How many lamps are on at the end?"
    )
    return Problem(question, str(len(on)), f"Pressed an odd number of times: {', '.join(map(str, on)) or 'none'}.")


def weekday(rng: random.Random, level: int) -> Problem:
    start, days = rng.randint(1, 7), rng.randint(8, 60 * level**2)
    end = (start - 1 + days) % 7 + 1
    question = (
        f"Number the days of the week from Monday = 1 to Sunday = 7. Today is day {start}. Which number has the day "
        f"{days} days from now?"
    )
    return Problem(question, str(end), f"{days} mod 7 = {days % 7}; {days % 7} days after day {start} is day {end}.")


def clubs(rng: random.Random, level: int) -> Problem:
    both, first, second, none = (rng.randint(1, 12 * level) for _ in range(4))
    total = both + first + second + none
    question = (
        f"Of {total} pupils, {first + both} play chess, {second + both} sing in the choir and {none} do neither. "
        "How many do both?"
    )
    steps = (
        f"{total} - {none} = {total - none} do something; {first + both} + {second + both} - {total - none} = {both}."
    )
    return Problem(question, str(both), steps)


FAMILIES: dict[str, Family] = {f.__name__: f for f in (ages, race, boxes, lamps, weekday, clubs)}


def load_reasoning(split: str = "train", *, limit: int | None = None, seed: int = 0) -> list[Row]:
    """Problems of all families and levels in turn; 8,192 to train on and 512 held out by default."""
    return generate_rows("reasoning", FAMILIES, split, limit=limit, seed=seed)
