"""The dynamic sampler: generates groups until enough of them carry a gradient.

Two strategies share one loop and differ in when they submit, when a batch is ready and what is left over:

- `stream` keeps a number of groups in flight and submits another as soon as one ends. Kept groups wait in order of
  submission, and a step takes the lowest N as soon as there are N. The others, and unfinished groups, are carried over
  to the next step. Taking whatever ends first would prefer short answers, so no group is left behind: a step waits for
  a group that would otherwise exceed `max_staleness` (staleness.py). With `max_staleness: 0` nothing may be carried over.
  A step then starts as many groups as it expects to need, takes the lowest N kept ones as soon as all groups submitted
  before them are judged, and drops the rest as surplus.
- `rounds` submits whole generation batches, waits for each, and drops the surplus, as DAPO and verl do.

Time is counted in calls of `engine.step()`, never in seconds: groups that finish in one call are scored during the next
`reward_lag` calls and judged after them. A batch is therefore a function of the seed, the weight versions and the
submission numbers, whatever the latency of the rewards, and a resumed run draws the same batches.

Every prompt from the source ends in exactly one way: trained on, filtered (`all_right`, `all_wrong`, `same_score`, or
`filtered` by the user's function), `reward_failed`, or skipped by prediction. When a group is too old to train on
(`stale_dropped`) or not needed (`surplus`), its prompt is put back and generated again under a new submission number.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any

from gspo.rewards.protocol import Scorer
from gspo.rollout.engine import GroupRequest, RolloutEngine
from gspo.sampling import errors
from gspo.sampling.admission import Admission
from gspo.sampling.filters import GroupFilter, judge
from gspo.sampling.group_json import pack_group, pack_request, unpack_group, unpack_request
from gspo.sampling.kept_groups import KeptQueue, Reserve
from gspo.sampling.prompt_draw import PromptDraw, PromptSource
from gspo.sampling.settings import SamplingSettings
from gspo.sampling.step_counts import SamplingCounts
from gspo.seeding import derive_seed
from gspo.types import Group, Prompt

Record = Callable[[Group, str, int], None]
MIN_ROLLOUTS_TO_FAIL = 8  # fewer failed rewards say nothing about a rate


class DynamicSampler:
    """A Sampler whose batches have exactly `train_batch_size` groups.

    `record(group, fate, version)` is called once per group, when its fate is known; `watch(kept, needed)` after every
    advance, for a progress line. `num_held()` is the number of groups that the engine can hold where that changes
    during a run; it replaces the settings' `max_in_flight`. `keep(group)` replaces the built-in filter.
    """

    def __init__(
        self,
        source: PromptSource,
        engine: RolloutEngine,
        scorer: Scorer,
        settings: SamplingSettings,
        *,
        seed: int,
        record: Record | None = None,
        watch: Callable[[int, int], None] | None = None,
        num_held: Callable[[], int] | None = None,
        keep: GroupFilter | None = None,
    ) -> None:
        self.version = 0
        self._engine, self._scorer, self._settings = engine, scorer, settings
        self._budget, self._admission, self._keep = settings.budget, Admission(settings, engine, num_held), keep
        self._prompts = PromptDraw(source, settings, seed=seed)
        self._rollout_seed = derive_seed(seed, "rollout")
        self._record = record or (lambda group, fate, version: None)
        self._watch = watch or (lambda kept, needed: None)
        self._queue = KeptQueue()
        self._in_flight: set[int] = set()  # submissions in the engine
        self._scoring: set[int] = set()  # submissions finished and not yet judged
        self._pending_versions: Counter[int] = Counter()  # of both
        self._submitted: deque[int] = deque()  # groups given to the scorer in each of the last `reward_lag` ticks
        self._scored: list[Group] = []  # collected for a checkpoint, to be judged in the next step
        self._taken: list[Group] = []  # handed out, not released
        self._reserve = Reserve(settings.train_batch_size if settings.on_limit == "keep_unfiltered" else 0)
        self._dropped_since_kept: Counter[str] = Counter()
        self._next_submission = 0
        self._begun = False  # whether `_report` counts for a batch not yet handed out
        self._report = self._new_report()

    def next_batch(self) -> tuple[list[Group], SamplingCounts]:
        """Generate until a batch is ready. It has fewer than N groups only when `on_limit` is not `raise`."""
        if self._taken:
            raise RuntimeError("next_batch() was called before release() of the last batch")
        self._begin()
        try:
            return self._next_batch()
        finally:
            self._begun = False

    def _next_batch(self) -> tuple[list[Group], SamplingCounts]:
        self._put_back(self._queue.remove(self._is_stale), "stale_dropped")
        self._judge_all(self._collect())
        while not self._is_ready():
            if not self._work():
                return self._end_short()
            self._watch(len(self._queue), self._settings.train_batch_size)
            self._check_failures(self._settings.train_batch_size * self._settings.n)
            if self._made_no_progress():
                cause = "a full pass over the data kept nothing"
                return self._fall_back(errors.starved(self._report, self._dropped_since_kept, cause))
        self._check_failures()
        return self._hand_out(self._queue.take(self._settings.train_batch_size))

    def work_ahead(self) -> bool:
        """Work one tick towards the next batch while the last one is trained on; False when there is nothing to do.

        This work is counted in the next batch's report. Groups that were handed out keep their places in the staleness
        budget until `release`. Without a budget (`max_staleness` 0), and with `rounds`, nothing runs ahead.
        """
        settings = self._settings
        if settings.max_staleness == 0 or settings.strategy == "rounds" or self._made_no_progress():
            return False
        self._begin()
        return self._work()

    def _begin(self) -> None:
        """Start the report of the next batch, unless it is started."""
        if not self._begun:
            self._report = self._new_report()
            self._prompts.num_skipped = 0
            self._begun = True
        self._report.version = self.version

    def _work(self) -> bool:
        """One tick: submit, generate, judge. False when nothing is pending and nothing may be submitted."""
        self._admit()
        if self._in_flight:
            self._advance()
        elif self._scoring:  # nothing to overlap with
            self._judge_all(self._collect())
        else:
            return False
        return True

    def release(self, groups: list[Group]) -> None:
        """State that `groups`, the last batch, have been trained on and that the new weights are live."""
        if [g.submission for g in groups] != [g.submission for g in self._taken]:
            raise RuntimeError("release() expects the groups of the last next_batch()")
        for group in groups:
            self._prompts.forget(group.submission)
        self._taken = []
        self.version += 1

    def find_prompt(self, uid: str) -> Prompt:
        """The prompt of that uid."""
        return self._prompts.find(uid)

    def state_dict(self) -> dict[str, Any]:
        """The state as plain JSON, exact between `release` and `next_batch`.

        A batch that is not yet released is saved as queued: a run that stopped within a step trains on it again.
        """
        self._scored = self._collect()
        return {
            "version": self.version,
            "next_submission": self._next_submission,
            "kept": [pack_group(g) for g in [*self._taken, *self._queue.groups()]],
            "scored": [pack_group(g) for g in self._scored],
            "reserve": [[pack_group(g), reason] for g, reason in self._reserve.held()],
            "unfinished": [pack_request(r) for r in self._engine.unfinished() if r.submission in self._in_flight],
            "dropped_since_kept": dict(self._dropped_since_kept),
            "last_judged": list(self._admission.last_judged),
            "prompts": self._prompts.state_dict(),
            "report": self._report.pack(self._prompts.num_skipped) if self._begun else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state: on a new sampler, with an idle engine that has the weights of the state."""
        if self._next_submission or self._engine.num_in_flight:
            raise RuntimeError("load_state_dict() expects a new sampler and an engine with nothing in flight")
        self.version = state["version"]
        if "prompts" not in state:  # of a branch whose sampling starts anew
            return
        self._prompts.load_state_dict(state["prompts"])
        self._next_submission = state["next_submission"]
        self._dropped_since_kept = Counter(state["dropped_since_kept"])
        kept, judged = state.get("last_judged", (0, 0))
        self._admission.last_judged = kept, judged
        if state["report"] is not None:
            self._report, self._begun = SamplingCounts.unpack(state["report"]), True
            self._prompts.num_skipped = self._report.num_skipped
        find = self._prompts.find
        self._scored = [unpack_group(g, find) for g in state["scored"]]
        self._scoring = {g.submission for g in self._scored}
        self._pending_versions.update(g.version for g in self._scored)
        for packed in state["kept"]:
            self._queue.push(unpack_group(packed, find))
        for packed, reason in state.get("reserve", ()):
            self._reserve.add(unpack_group(packed, find), reason)
        for packed in state["unfinished"]:
            request = unpack_request(packed, find, self._settings.params, self._rollout_seed)
            self._start(request)

    def close(self) -> None:
        """Nothing to end: the engine and the scorer belong to the caller."""

    @property
    def _num_pending(self) -> int:
        return len(self._in_flight) + len(self._scoring)

    def _new_report(self) -> SamplingCounts:
        return SamplingCounts(self.version, self._settings.generation_batch, self._settings.train_batch_size)

    def _is_stale(self, group: Group) -> bool:
        return self._budget.is_stale(group.version, self.version)

    def _is_ready(self) -> bool:
        if len(self._queue) < self._settings.train_batch_size:
            return False
        if self._settings.strategy == "rounds":
            return self._num_pending == 0
        if self._settings.starts_surplus:
            last = self._queue.last_of(self._settings.train_batch_size)
            return all(submission > last for submission in (*self._in_flight, *self._scoring))
        return not self._budget.must_wait(self._pending_versions, self._queue.versions, self.version)

    def _admit(self) -> None:
        num_training = self._settings.train_batch_size if self._taken else 0
        room = self._admission.room(
            self._report, len(self._in_flight), len(self._scoring), len(self._queue), num_training
        )
        for _ in range(room):
            prompt = self._prompts.next(self._next_submission)
            if prompt is None:
                return
            request = GroupRequest(
                prompt=prompt,
                submission=self._next_submission,
                n=self._settings.n,
                version=self.version,
                params=self._settings.params,
                seed=self._rollout_seed,
            )
            self._next_submission += 1
            self._report.num_submitted += 1
            self._start(request)

    def _start(self, request: GroupRequest) -> None:
        self._in_flight.add(request.submission)
        self._pending_versions[request.version] += 1
        self._engine.submit(request)

    def _advance(self) -> None:
        """One tick: generate, submit finished groups for scoring, judge those scored in the meantime."""
        finished = self._engine.step()
        due = self._submitted.popleft() if len(self._submitted) >= self._settings.reward_lag else 0
        scored, self._scored = self._scored, []
        scored += self._scorer.collect(due) if due else []
        self._submitted.append(len(finished))
        for group in finished:
            self._in_flight.remove(group.submission)
            self._scoring.add(group.submission)
            self._scorer.submit(group)
        self._judge_all(scored)
        if self._in_flight and self._engine.num_in_flight == 0:
            raise RuntimeError(f"the engine lost submissions {sorted(self._in_flight)[:5]}: nothing is in flight")

    def _collect(self) -> list[Group]:
        """Every group that is being scored, with its rewards."""
        self._submitted.clear()
        held, self._scored = self._scored, []
        return held + self._scorer.collect() if len(self._scoring) > len(held) else held

    def _judge_all(self, groups: list[Group]) -> None:
        for group in groups:
            self._judge(group)

    def _judge(self, group: Group) -> None:
        """Keep a scored group, discard it or put its prompt back."""
        self._scoring.remove(group.submission)
        self._pending_versions[group.version] -= 1
        self._report.add_generated(group)
        if self._is_stale(group):
            self._report.fates["stale_dropped"] += 1
            self._put_back([group], "stale_dropped")
            return
        s = self._settings
        verdict = judge(group, s.metric, enable=s.enable, keep=self._keep, min_spread=s.min_spread)
        self._report.fates[verdict.reason] += 1
        self._report.add_prediction(self._prompts.learn(verdict.group))
        if verdict.keep:
            self._dropped_since_kept.clear()
            self._queue.push(verdict.group)
            return
        self._dropped_since_kept[verdict.reason] += 1
        if verdict.reason == "reward_failed":
            self._discard([(group, verdict.reason)])
        else:
            self._discard(self._reserve.add(verdict.group, verdict.reason))

    def _discard(self, groups: list[tuple[Group, str]]) -> None:
        for group, fate in groups:
            self._prompts.forget(group.submission)
            self._report.wasted_tokens += group.num_tokens
            self._record(group, fate, self.version)

    def _put_back(self, groups: list[Group], fate: str) -> None:
        """Discard groups and put their prompts back, to be generated again."""
        self._report.discarded[fate] += len(groups)
        self._discard([(group, fate) for group in groups])
        for group in groups:
            self._prompts.put_back(group.prompt)

    def _drop_pending(self) -> None:
        """Drop the groups in generation or scoring and put their prompts back."""
        unfinished = [r for r in self._engine.unfinished() if r.submission in self._in_flight]
        self._engine.clear()
        finished = self._collect()
        self._report.generated_tokens += sum(group.num_tokens for group in finished)
        self._put_back(finished, "surplus")
        self._report.discarded["surplus"] += len(unfinished)
        for request in unfinished:
            self._prompts.forget(request.submission)
            num_tokens = sum(part.num_generated_tokens for part in request.partial)
            self._report.generated_tokens += num_tokens
            self._report.wasted_tokens += num_tokens
            self._prompts.put_back(request.prompt)
        self._in_flight, self._scoring, self._pending_versions = set(), set(), Counter()

    def _made_no_progress(self) -> bool:
        """Whether a step without a limit kept nothing of a full pass over the data and of a generation batch."""
        settings = self._settings
        if settings.submission_limit is not None or (settings.strategy == "rounds" and self._num_pending):
            return False
        full_pass = max(self._prompts.epoch_size, settings.generation_batch)
        return self._dropped_since_kept.total() >= full_pass

    def _check_failures(self, min_rollouts: int = 0) -> None:
        report, max_rate = self._report, self._settings.max_failure_rate
        if report.num_rollouts >= max(min_rollouts, MIN_ROLLOUTS_TO_FAIL) and report.failure_rate > max_rate:
            error = errors.reward_failures(report, max_rate)
            self._drop_pending()  # a run that goes on from here tries their prompts again
            raise error

    def _end_short(self) -> tuple[list[Group], SamplingCounts]:
        """End a step with nothing pending and nothing left to submit: at the limit, or at the end of the data."""
        limit = self._settings.submission_limit
        if limit is not None and self._report.num_submitted >= limit:
            return self._fall_back(errors.generation_limit(self._report, self._settings.max_num_gen_batches))
        self._check_failures()
        self._discard(self._reserve.clear())
        raise errors.data_exhausted(self._report, len(self._queue))

    def _fall_back(self, error: errors.SamplingError) -> tuple[list[Group], SamplingCounts]:
        """Apply `on_limit`: raise, or hand out the groups there are."""
        self._check_failures()
        dropped = self._dropped_since_kept
        self._dropped_since_kept = Counter()  # a run that goes on from here gets another full pass
        on_limit, needed = self._settings.on_limit, self._settings.train_batch_size
        if on_limit == "raise":
            raise error
        groups = self._queue.take(needed)
        extra = [group for group, _ in self._reserve.take(needed - len(groups))]
        if not groups and not extra:
            cause = f"filter_groups.on_limit={on_limit} found nothing to train on"
            raise errors.starved(self._report, dropped, cause) from error
        return self._hand_out(groups, extra)

    def _hand_out(self, kept: list[Group], unfiltered: list[Group] | None = None) -> tuple[list[Group], SamplingCounts]:
        """End the step with these groups. The others are carried over, or dropped with `rounds`."""
        report, unfiltered = self._report, unfiltered or []
        self._admission.last_judged = (report.fates["kept"], report.num_generated)
        if self._settings.starts_surplus:
            self._drop_pending()
        if self._settings.strategy == "rounds" or self._settings.starts_surplus:
            self._put_back(self._queue.take(len(self._queue)), "surplus")
        self._discard(self._reserve.clear())
        for fate, groups in (("kept", kept), ("unfiltered", unfiltered)):
            for group in groups:
                self._record(group, fate, self.version)
        batch = sorted([*kept, *unfiltered], key=lambda group: group.submission)
        if self._settings.predict_weight:
            report.weights = tuple(self._prompts.weight(group.submission) for group in batch)
        report.add_trained(batch, num_unfiltered=len(unfiltered))
        report.num_carried = self._num_pending + len(self._queue)
        report.num_skipped = self._prompts.num_skipped
        self._taken = batch
        return batch, report
