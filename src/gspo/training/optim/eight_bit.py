"""AdamW with both moments in 8 bits, by bitsandbytes (arXiv 2110.02861): 2 bytes per parameter instead of 8.

A moment is a code per element and a float32 scale per block of 256. Tensors below 4,096 elements keep float32 moments.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from gspo.models.bitsandbytes_extra import require_bitsandbytes
from gspo.training.optim.adamw import MOMENTS, MasterOptimizer

KEY = "actor_rollout_ref.actor.optim.eight_bit"
BLOCK, MIN_ELEMENTS = 256, 4096  # of bitsandbytes
# Our names of the state of bitsandbytes. Its code tables (qmap1, qmap2) are constants.
NAMES = {"exp_avg": "state1", "exp_avg_sq": "state2", "exp_avg_scale": "absmax1", "exp_avg_sq_scale": "absmax2"}


class EightBitOptimizer(MasterOptimizer):
    """AdamW over float32 masters with moments in 8 bits. A checkpoint holds the codes, so a resume is exact."""

    state_keys = ("step", *NAMES)

    def _make_adamw(
        self, *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float, fused: bool
    ) -> torch.optim.Optimizer:
        package = require_bitsandbytes(KEY)
        masters = list(self.masters.values())
        return package.optim.AdamW8bit(
            masters, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, min_8bit_size=MIN_ELEMENTS
        )

    def _skips_on_device(self, grads: list[Tensor]) -> bool:
        """No: its kernels apply every step."""
        return False

    def prepare_state(self, names: Iterable[str] | None = None) -> None:
        (group,) = self.adamw.param_groups
        places = {id(master): place for place, master in enumerate(group["params"])}
        for name in self.masters if names is None else names:
            master = self.masters[name]
            if not self.adamw.state.get(master):
                self.adamw.init_state(group, master, 0, places[id(master)])  # pyright: ignore[reportAttributeAccessIssue]

    def move_state(self, device: torch.device | str) -> None:
        for state in self.adamw.state.values():
            for key in NAMES.values():
                if key in state:
                    state[key] = state[key].to(device)

    def _state_of(self, master: nn.Parameter) -> dict[str, Tensor]:
        state = self.adamw.state.get(master, {})
        if not state:
            return {}
        named = {ours: state[theirs] for ours, theirs in NAMES.items() if theirs in state}
        return {"step": torch.tensor(float(state["step"])), **named}

    def _shapes_of(self, master: nn.Parameter) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {"step": (), **{key: tuple(master.shape) for key in MOMENTS}}
        if master.numel() >= MIN_ELEMENTS:
            num_blocks = -(-master.numel() // BLOCK)
            shapes |= {f"{key}_scale": (num_blocks,) for key in MOMENTS}
        return shapes

    def _set_state(self, name: str, state: dict[str, Tensor]) -> None:
        master = self.masters[name]
        self.adamw.state.pop(master, None)
        self.prepare_state([name])
        own = self.adamw.state[master]
        own["step"] = int(state["step"])
        for ours, theirs in NAMES.items():
            if ours in state:
                own[theirs].copy_(state[ours])
