"""The forty-one hostile programs, by name."""

from __future__ import annotations

from .attack import Attack, World
from .host import HOST
from .resources import RESOURCES
from .verdict import VERDICT

ATTACKS: dict[str, Attack] = {attack.name: attack for attack in [*VERDICT, *HOST, *RESOURCES]}


def cases_for(attack: Attack, world: World) -> dict:
    """The tests an attack faces: an answer that cannot be guessed, in the style the attack is written for."""
    if attack.name == "prefix_output":
        return {"inputs": [""], "outputs": [str(int(world.token, 16) % 100)]}
    if attack.name == "tamper_shared_result":
        return {"assert_case": [f"assert answer(1) == {world.expected!r}"]}
    if attack.name == "tester_scope":
        number = int(world.token, 16) % 10**9 + 1
        return {
            "assert_case": [f"assert abs(answer(1) - {number}) < 1e-6", f"assert math.isclose(answer(2), {number})"]
        }
    return world.tests
