"""The `trainer` section: length of the run, evaluation, checkpoints, logging, device."""

from __future__ import annotations

from typing import Literal

from gspo.config.schema.fields import Section, key


class EarlyStopConfig(Section):
    """The end of a run that no longer improves. It is saved, evaluated and reported as at its last step."""

    metric: str | None = key(
        default=None,
        doc="What must improve, a metric of evaluations; null = held-out accuracy, or the reward where there is none. Of "
        "metrics that end with loss or perplexity, smaller is better.",
        example="val-core/math/acc/mean@1",
        may_change_on_resume=True,
    )
    patience: int = key(
        default=0,
        doc="End the run after this many evaluations without an improvement; 0 = never. trainer.test_freq sets how often "
        "the run is evaluated.",
        ge=0,
        unit="evaluations",
        may_change_on_resume=True,
    )
    min_delta: float = key(
        default=0.0, doc="Smallest difference that counts as an improvement.", ge=0, may_change_on_resume=True
    )


class PPOTrainerConfig(Section):
    """The run: length, evaluation, checkpoints, logging, device."""

    total_epochs: int = key(
        default=30,
        doc="Passes over the training data. total_training_steps takes precedence.",
        ge=1,
        may_change_on_resume=True,
    )
    total_training_steps: int | None = key(
        default=None,
        doc="Training steps of the run; null = as many as total_epochs makes.",
        ge=1,
        unit="steps",
        may_change_on_resume=True,
    )
    project_name: str = key(
        default="gspo", doc="Project name, for loggers that have projects.", may_change_on_resume=True
    )
    experiment_name: str | None = key(
        default=None,
        doc="Name of the run and of its folder; null = MODEL-DATA-NNN with the next free number.",
        may_change_on_resume=True,
    )
    tags: list[str] = key(
        factory=list,
        doc="Words that describe the run, shown in the dashboard's list of runs and found by its search.",
        example="[baseline, math]",
        may_change_on_resume=True,
    )
    default_local_dir: str = key(default="runs", doc="Folder that contains the run folders.", may_change_on_resume=True)
    logger: list[str] = key(
        factory=lambda: ["console"],
        built_in=("console", "tensorboard", "wandb", "trackio"),
        doc="Where metrics go besides the run folder. Sinks of your own: a registered name or module:function.",
        example="[console, wandb]",
        may_change_on_resume=True,
    )
    log_val_generations: int = key(
        default=3,
        doc="How many held-out questions to print at the end of the run, out of those that became right, with the "
        "responses before and after training.",
        ge=0,
        may_change_on_resume=True,
    )
    console_table_freq: int = key(
        default=10,
        doc="On a terminal, repeat the titles of the table of steps every N training steps; 0 = print them once.",
        ge=0,
        unit="steps",
        may_change_on_resume=True,
    )
    val_before_train: bool = key(default=True, doc="Evaluate before the first step.", may_change_on_resume=True)
    val_after_train: bool = key(default=True, doc="Evaluate after the last step.", may_change_on_resume=True)
    val_accuracy: bool = key(
        default=False,
        doc="For gspo sft: evaluations also answer the held-out prompts and grade the answers, as gspo eval does. gspo "
        "train always does.",
        may_change_on_resume=True,
    )
    test_freq: int = key(
        default=-1,
        doc="Evaluate every N training steps; 0 or less = only before and after training.",
        unit="steps",
        may_change_on_resume=True,
    )
    save_freq: int | str = key(
        default="auto",
        doc="Save a checkpoint every N training steps; auto = as often as is possible within 5 % of the time; 0 or "
        "less = only at the end.",
        may_change_on_resume=True,
    )
    max_actor_ckpt_to_keep: int | None = key(
        default=2, doc="How many of the newest checkpoints to keep; null = all.", ge=1, may_change_on_resume=True
    )
    keep_best: int = key(
        default=0,
        doc="Keep this many of the best checkpoints too, by held-out accuracy (else reward): an evaluation that is among "
        "the best saves one. `gspo eval RUN` uses the best. An evaluation in which a data source has fewer than half of "
        "its rewards is never a best.",
        ge=0,
        may_change_on_resume=True,
    )
    early_stop: EarlyStopConfig = key(factory=EarlyStopConfig, doc="When the run ends early.")
    resume_mode: str = key(
        default="auto",
        doc="auto continues from the newest intact checkpoint of the run, disable starts again, and a path continues "
        "from that checkpoint or run folder.",
        may_change_on_resume=True,
    )
    seed: int = key(default=0, doc="Seed of all random numbers.", ge=0)
    device: str = key(default="auto", doc="auto (a GPU if there is one), cpu, cuda, or cuda:N for one of several GPUs.")
    num_threads: int | None = key(
        default=None, doc="CPU threads of torch; null = OMP_NUM_THREADS, else one per core.", ge=1
    )
    memory_check: Literal["refuse", "warn", "off"] = key(
        default="refuse",
        doc="Before training in one process: estimate the memory that the run needs, adapt the sizes that nobody set, and "
        "refuse to start, or only warn, if it is still more than the machine has.",
        may_change_on_resume=True,
    )
    deterministic: bool = key(
        default=False,
        doc="Use only deterministic operations, so that runs on a GPU repeat and resume with the same bits. Slower.",
    )
    backend: Literal["local", "ray"] = key(
        default="local",
        doc="local runs on this machine; ray on the cluster at RAY_ADDRESS, or on a local one without it.",
        may_change_on_resume=True,
    )
    nnodes: int = key(default=1, doc="With ray: number of machines that train.", ge=1, may_change_on_resume=True)
    n_gpus_per_node: int | None = key(
        default=None,
        doc="Trainer ranks per machine, one device each, with strategy=fsdp2 or ray; null = all GPUs (with ray, those "
        "that rollout workers leave), or 1 without GPUs.",
        ge=0,
        may_change_on_resume=True,
    )
    resume_missing: Literal["refuse", "reset"] = key(
        default="refuse",
        doc="When a checkpoint lacks optimiser state that this run needs, or has other state: refuse it and name what is "
        "missing (the older checkpoint is used if there is one), or start the missing state at 0 (reset), with a note "
        "in the log.",
        may_change_on_resume=True,
    )
    critic_warmup: int = key(default=0, doc="Steps at the start that train only the critic.", ge=0, unit="steps")
    on_alarm: Literal["warn", "pause", "rollback"] = key(
        default="warn",
        doc="After an alarm (ratio explosion, entropy collapse, …): only warn, save and stop (pause), or return to an "
        "earlier checkpoint with half the learning rate (rollback).",
        may_change_on_resume=True,
    )
    max_skipped_steps: int = key(
        default=3,
        doc="Stop after this many training steps in a row in which updates were skipped because of non-finite numbers.",
        ge=1,
        unit="steps",
        may_change_on_resume=True,
    )
    watchdog_seconds: float = key(
        default=600.0,
        doc="After this long without progress, name the current stage and write all stacks to the run folder; 0 = "
        "never.",
        ge=0,
        unit="seconds",
        may_change_on_resume=True,
    )
    watchdog_stop_seconds: float = key(
        default=3600.0,
        doc="Stop the run after this long without progress; 0 = never.",
        ge=0,
        unit="seconds",
        may_change_on_resume=True,
    )
    plugins: list[str] = key(
        factory=list,
        doc="Python files or modules to import at the start, such as those that register your own losses or rewards.",
        example="[my_losses.py]",
    )
    callbacks: list[str] = key(
        factory=list,
        doc="Your callbacks of the training loop: registered names or module:function.",
        example="[my_callbacks:announce]",
        may_change_on_resume=True,
    )
    save_groups: bool = key(
        default=True, doc="Write every group with its responses to the run folder.", may_change_on_resume=True
    )
