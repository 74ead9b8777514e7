"""The `trainer` section: how long, how often, where to, on what."""

from __future__ import annotations

from typing import Literal

from gspo.config.schema.fields import Section, key, section


@section
class PPOTrainerConfig(Section):
    """The run: length, evaluation, checkpoints, logging, device."""

    total_epochs: int = key(
        default=30,
        doc="Passes over the training data, unless total_training_steps is set.",
        ge=1,
        may_change_on_resume=True,
    )
    total_training_steps: int | None = key(
        default=None,
        doc="Training steps; null = by total_epochs.",
        ge=1,
        unit="steps",
        may_change_on_resume=True,
    )
    project_name: str = key(
        default="gspo", doc="Project, for loggers that have one.", may_change_on_resume=True
    )
    experiment_name: str | None = key(
        default=None,
        doc="Name of the run and its folder; null = model, data and time.",
        may_change_on_resume=True,
    )
    default_local_dir: str = key(
        default="runs", doc="Folder that holds the run folders.", may_change_on_resume=True
    )
    logger: list[str] = key(
        factory=lambda: ["console"],
        built_in=("console", "tensorboard", "wandb", "trackio"),
        doc="Where metrics go beside the run folder; others are registered names or module:function (docs/extend.md).",
        may_change_on_resume=True,
    )
    log_val_generations: int = key(
        default=3,
        doc="Held-out responses shown in words at each evaluation.",
        ge=0,
        may_change_on_resume=True,
    )
    console_table_freq: int = key(
        default=10,
        doc="Training steps between tables on the console; 0 = never.",
        ge=0,
        unit="steps",
        may_change_on_resume=True,
    )
    val_before_train: bool = key(
        default=True, doc="Evaluate before the first step.", may_change_on_resume=True
    )
    val_after_train: bool = key(default=True, doc="Evaluate after the last step.", may_change_on_resume=True)
    test_freq: int = key(
        default=-1,
        doc="Evaluate every so many steps; <= 0 = only before and after.",
        unit="steps",
        may_change_on_resume=True,
    )
    save_freq: int | str = key(
        default="auto",
        doc="Checkpoint every so many steps; auto = as often as costs at most 5 % of the time; <= 0 = only at the end.",
        may_change_on_resume=True,
    )
    max_actor_ckpt_to_keep: int | None = key(
        default=2, doc="Newest checkpoints kept; null = all.", ge=1, may_change_on_resume=True
    )
    resume_mode: str = key(
        default="auto",
        doc="auto goes on from the run's newest whole checkpoint, disable starts anew, PATH goes on from it.",
        may_change_on_resume=True,
    )
    seed: int = key(default=0, doc="Seed of everything that is random.", ge=0)
    device: str = key(default="auto", doc="auto = a GPU when there is one; or cpu, cuda, cuda:N.")
    num_threads: int | None = key(default=None, doc="CPU threads of torch; null = all cores.", ge=1)
    deterministic: bool = key(
        default=False, doc="Only deterministic operations on a GPU: slower, resumes to the bit."
    )
    backend: Literal["local", "ray"] = key(
        default="local",
        doc="local runs in this process; ray on the cluster of RAY_ADDRESS, or a local one.",
        may_change_on_resume=True,
    )
    nnodes: int = key(default=1, doc="ray: machines that train.", ge=1, may_change_on_resume=True)
    n_gpus_per_node: int | None = key(
        default=None,
        doc="ray: trainer ranks a machine, one device each; null = all GPUs that rollout workers leave, else 1.",
        ge=0,
        may_change_on_resume=True,
    )
    critic_warmup: int = key(default=0, doc="Steps in which only the critic is trained.", ge=0, unit="steps")
    on_alarm: Literal["warn", "pause", "rollback"] = key(
        default="warn",
        doc="What an alarm (ratio explosion, entropy collapse, …) does.",
        may_change_on_resume=True,
    )
    max_skipped_steps: int = key(
        default=3,
        doc="Non-finite optimiser steps in a row that stop the run.",
        ge=1,
        may_change_on_resume=True,
    )
    watchdog_seconds: float = key(
        default=600.0,
        doc="No progress for so long: the stage is named and all stacks are written to the run folder; 0 = never.",
        ge=0,
        unit="seconds",
        may_change_on_resume=True,
    )
    watchdog_stop_seconds: float = key(
        default=3600.0,
        doc="No progress for so long stops the run; 0 = never.",
        ge=0,
        unit="seconds",
        may_change_on_resume=True,
    )
    plugins: list[str] = key(
        factory=list,
        doc="Python files or modules imported at the start, which register losses, rewards and others (docs/extend.md).",
    )
    callbacks: list[str] = key(
        factory=list,
        doc="Callbacks of the loop: registered names or module:function (docs/extend.md).",
    )
    save_groups: bool = key(
        default=True,
        doc="Write every group with its responses into the run folder.",
        may_change_on_resume=True,
    )
