"""Row D2: broken configurations end with exit code 2, the key's name, in under two seconds and without a model library."""

from __future__ import annotations

import subprocess
import sys
import time

from tests.faults.row import Check, Row

LIMIT = 2.0  # seconds of processor time that a check may use

# The words after `gspo train`, and the name that the message must contain.
BROKEN: tuple[tuple[str, str], ...] = (
    ("data.trian_batch_size=64", "data.train_batch_size"),
    ("actor_rollout_ref.actor.clip_ratio_hgih=4e-4", "clip_ratio_high"),
    ("algorithm.filter_group.enable=true", "algorithm.filter_groups.enable"),
    ("--gruop_size 4", "group_size"),
    ("--learning_rat=1e-6", "learning_rate"),
    ("data.clip_ratio_low=3e-4", "actor_rollout_ref.actor.clip_ratio_low"),
    ("actor_rollout_ref.actor.policy_loss.loss_mode=gsop", "policy_loss.loss_mode"),
    ("actor_rollout_ref.actor.loss_agg_mode=mean", "loss_agg_mode"),
    ("algorithm.adv_estimator=grppo", "adv_estimator"),
    ("data.train_batch_size=many", "data.train_batch_size"),
    ("actor_rollout_ref.rollout.n=0", "rollout.n"),
    ("actor_rollout_ref.rollout.temperature=-1", "rollout.temperature"),
    ("algorithm.filter_groups.enable=true actor_rollout_ref.rollout.n=1", "rollout.n"),
    ("data.train_batch_size=32 actor_rollout_ref.actor.ppo_mini_batch_size=5", "ppo_mini_batch_size"),
    ("data.num_train_samples=8 data.train_batch_size=32", "num_train_samples"),
    ("data.train_files=nowhere.jsonl", "data.train_files"),
    ("custom_reward_function.path=nowhere.py", "custom_reward_function.path"),
    ("trainer.resume_mode=disabled", "trainer.resume_mode"),
    ("trainer.device=gpu", "trainer.device"),
    ("nowhere.yaml", "nowhere.yaml"),
)

# Runs the program and reports its exit code, its processor time and the model libraries that it loaded.
_PROBE = """
import sys, time
from gspo.cli import main
sys.argv = ["gspo", "train", *sys.argv[1:]]
code = 0
try:
    main()
except SystemExit as end:
    code = end.code or 0
loaded = [name for name in ("torch", "transformers") if name in sys.modules]
print("\\nprobe", code, time.process_time(), ",".join(loaded) or "none")
"""


def broken_configs(seed: int) -> Row:
    start = time.monotonic()
    bad = []
    slowest = 0.0
    for words, name in BROKEN:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE, *words.split()], capture_output=True, text=True, timeout=60, check=False
        )
        output = done.stdout + done.stderr
        code, seconds, loaded = output.rsplit("probe ", 1)[-1].split()[:3]
        slowest = max(slowest, float(seconds))
        if code != "2" or name not in output or loaded != "none" or float(seconds) > LIMIT:
            bad.append(words)
    detail = f"{len(BROKEN) - len(bad)}/{len(BROKEN)} named, exit 2, no model library, at most {slowest:.1f} s each"
    return Row("D2", "20 broken configs", not bad, detail if not bad else f"not: {bad}", time.monotonic() - start)


ROWS: dict[str, Check] = {"D2": broken_configs}
