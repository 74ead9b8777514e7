"""An engine of episodes around any engine: turns of the model, answers of an environment, until the episode is over.

    sampler ── submit ──▶ Episodes ── play (reset) ──▶ EpisodePool
                             │ opening                     │
                             ├── submit one response ──▶ inner engine
       tick k:               │ ◀── the turn has ended ──────┘
                             ├── play (all actions) ──▶ EpisodePool, which works during the next ticks
       tick k + lag:         │ ◀── answer; waits for it if it is late
                             ├── submit the response with turn and observation ──▶ inner engine

A tick is one call of `step`. Answers are read `lag` ticks after their turn ended, however long they took, and in order
of submission: what an episode sees, and when, depends on no clock. The tokens of a response are only ever appended to.
The inner engine gets each turn as a request of its own, with the tokens so far as its partial response, so draws depend
on the same (seed, submission, response, position) as without turns, and any engine that continues partial responses
serves.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from gspo.environments.pool import EpisodePool
from gspo.metrics import Metric, Metrics
from gspo.rewards.pool.worker_pool import JobFailed
from gspo.rollout.engine import EngineError, GroupRequest, RolloutEngine, check_request
from gspo.rollout.episodes.dialogue import Dialogue
from gspo.rollout.episodes.episode import Episode, EpisodeGroup, State
from gspo.types import FinishReason, Group, Rollout

Submit = Callable[[GroupRequest], None]


@dataclasses.dataclass(slots=True)
class EpisodeCounts:
    """Totals since the start."""

    diverged: int = 0
    seconds: float = 0.0  # spent waiting for environments
    num_writing: int = 0  # responses in the engine, summed over ticks
    num_waiting: int = 0  # responses that wait for their environment, summed over ticks


class Episodes(RolloutEngine):
    """A RolloutEngine whose rollouts have turns. `opens=True` states that the environment begins with messages.

    An environment that fails leaves its rollout with a `failure`, so that it has no reward. A resumed episode is played
    again; if it then answers differently than recorded, its group is generated anew.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        pool: EpisodePool,
        dialogue: Dialogue,
        *,
        max_length: int,
        opens: bool = False,
        lag: int = 1,
    ) -> None:
        self._engine, self._pool, self._dialogue = engine, pool, dialogue
        self._max_length, self._opens, self._lag = max_length, opens, lag
        self._groups: list[EpisodeGroup] = []
        self._tick = 0
        self.counts = EpisodeCounts()

    @property
    def num_in_flight(self) -> int:
        return len(self._groups)

    def submit(self, request: GroupRequest) -> None:
        check_request(request, self._max_length)
        group = EpisodeGroup.of(request)
        self._groups.append(group)
        self._begin(group, self._engine.submit)

    def step(self) -> list[Group]:
        if not self._groups:
            return []
        self._tick += 1
        live = self._live()
        self._read_answers([e for e in live if e.state == "resetting"], self._engine.submit)
        states = [e.state for e in live]
        self.counts.num_writing += states.count("writing")
        self.counts.num_waiting += states.count("waiting")
        if self._engine.num_in_flight:
            self._end_turns(self._engine.step(), live, self._engine.submit)
        self._read_answers([e for e in live if e.state == "waiting" and e.due <= self._tick], self._engine.submit)
        self._restart_diverged(self._groups, self._engine.submit)
        return self._take_finished()

    def generate(self, requests: Sequence[GroupRequest]) -> list[Group]:
        """Turn by turn: the engine generates one turn of every response, then the environments answer all of them."""
        for request in requests:
            check_request(request, self._max_length)
        groups = [EpisodeGroup.of(request) for request in requests]
        turns: list[GroupRequest] = []
        for group in groups:
            self._begin(group, turns.append)
        episodes = [e for group in groups for e in group.episodes]
        while not all(group.is_over for group in groups):
            self._read_answers([e for e in episodes if e.state == "resetting"], turns.append)
            now, turns = turns, []
            self._end_turns(self._engine.generate(now), episodes, turns.append)
            self._read_answers([e for e in episodes if e.state == "waiting"], turns.append)
            self._restart_diverged(groups, turns.append)
        return [group.group() for group in groups]

    def load_weights(self, weights: Any, version: int) -> None:
        """Make new weights live. Answers that are on their way are read `lag` ticks from now, as in a resumed run."""
        self._engine.load_weights(weights, version)
        for episode in self._live():
            episode.due = self._tick + self._lag

    def unfinished(self) -> list[GroupRequest]:
        running = {(r.submission, r.first_response): r.partial[0] for r in self._engine.unfinished() if r.partial}
        requests = [group.as_request(running) for group in self._groups]
        return sorted(requests, key=lambda request: request.submission)

    def clear(self) -> None:
        self._engine.clear()
        for episode in self._live():
            self._pool.end(episode.key)
        self._groups = []

    def close(self) -> None:
        self._groups = []
        self._engine.close()
        self._pool.close()

    def num_wanted(self, limit: int) -> int | None:
        """As the engine says; a response that waits for its environment will be back."""
        wanted = self._engine.num_wanted(limit)
        return None if wanted is None else wanted - sum(episode.state != "writing" for episode in self._live())

    @property
    def num_workers(self) -> int:
        return self._engine.num_workers

    def rest(self) -> None:
        self._engine.rest()

    def metrics(self) -> Metrics:
        counts = self.counts
        present = counts.num_writing + counts.num_waiting
        return {
            **self._engine.metrics(),
            "environment/seconds": Metric("last", counts.seconds),
            "environment/timeouts": Metric("last", self._pool.counts.timeouts),
            "environment/diverged": Metric("last", counts.diverged),
            "rollout/waiting_share": Metric("last", counts.num_waiting / present if present else 0.0),
        }

    def stacks(self) -> str:
        return self._engine.stacks()

    def kill(self) -> None:
        self._engine.kill()

    def _live(self) -> list[Episode]:
        """The responses that are not finished, in order of submission."""
        found = [e for group in self._groups for e in group.episodes if e.state != "over"]
        return sorted(found, key=lambda episode: episode.number)

    def _begin(self, group: EpisodeGroup, submit: Submit) -> None:
        """Begin a group, or continue it from its partial responses."""
        for episode in group.episodes:
            if episode.state == "over":
                continue
            if self._opens and not group.prompt.opening:
                self._ask(episode, "resetting")
                continue
            episode.read_actions(self._dialogue, group.request.params.max_tokens)
            if episode.turn_is_over:
                self._ask(episode, "waiting")
            else:
                self._write(episode, submit)

    def _ask(self, episode: Episode, state: State) -> None:
        """Have the environment answer the last turn, or begin."""
        episode.state, episode.due = state, self._tick + self._lag
        episode.answer = self._pool.play(episode.job(max(0, len(episode.actions) - 1)))

    def _write(self, episode: Episode, submit: Submit) -> None:
        """Let the engine write on from the tokens so far."""
        request = episode.group.request
        episode.state, episode.answer = "writing", None
        params = dataclasses.replace(
            request.params, stop_token_ids=(*request.params.stop_token_ids, *self._dialogue.stop_token_ids)
        )
        submit(
            dataclasses.replace(
                request,
                prompt=dataclasses.replace(episode.group.prompt, uid=episode.name),
                n=1,
                params=params,
                partial=(episode.rollout,) if episode.rollout.token_ids else (),
                first_response=episode.number[1],
                hold=True,
            )
        )

    def _end_turns(self, groups: Sequence[Group], episodes: Iterable[Episode], submit: Submit) -> None:
        """Take over what the engine wrote: a turn goes to its environment, one that is not over is written on."""
        by_name = {(e.number[0], e.name): e for e in episodes}
        ended = [(by_name[group.submission, group.prompt.uid], group.rollouts[0]) for group in groups]
        for episode, rollout in sorted(ended, key=lambda pair: pair[0].number):
            _check_continued(episode, rollout)
            if episode.group.diverged:
                episode.state = "over"
            else:
                self._end_turn(episode, rollout, submit)

    def _end_turn(self, episode: Episode, rollout: Rollout, submit: Submit) -> None:
        most = episode.group.request.params.max_tokens
        own = rollout.token_ids[episode.turn_start :]
        length = self._dialogue.turn_length(own, was_cut=len(rollout.token_ids) >= most)
        if length is None:
            episode.rollout = dataclasses.replace(
                rollout, finish_reason="aborted", text="", turns=episode.rollout.turns
            )
            self._write(episode, submit)
            return
        was_cut = episode.turn_start + length >= most
        episode.end_turn(rollout, self._dialogue.action(own[:length], len(episode.actions), was_cut=was_cut))
        self._ask(episode, "waiting")

    def _read_answers(self, episodes: Sequence[Episode], submit: Submit) -> None:
        """Read the answers of environments, in order of submission; waits for those that are late."""
        for episode in episodes:
            if episode.group.diverged:
                continue
            assert episode.answer is not None
            start = time.monotonic()
            try:
                answer = episode.answer.result()
            except JobFailed as error:
                self._fail(episode, str(error))
                continue
            finally:
                self.counts.seconds += time.monotonic() - start
            if episode.state == "resetting":
                self._open(episode, answer, submit)
            elif self._is_as_recorded(episode, answer):
                self._continue(episode, answer["steps"][-1], submit)
            else:
                self._abandon(episode.group)

    def _open(self, episode: Episode, answer: Mapping[str, Any], submit: Submit) -> None:
        """Add the environment's first messages to the prompt, once per group, and let the model begin."""
        group, opening = episode.group, tuple(answer["opening"])
        if not group.prompt.opening and opening:
            tokens = self._dialogue.opened(group.prompt, opening)
            messages = (*group.prompt.messages, *opening)
            opened = dataclasses.replace(group.prompt, messages=messages, token_ids=tokens, opening=opening)
            try:
                check_request(dataclasses.replace(group.request, prompt=opened), self._max_length)
            except ValueError as error:
                self._fail(episode, f"reset: {error}")
                return
            group.prompt = opened
        if group.prompt.opening != opening:
            self._fail(episode, "reset gave another beginning than for another response with the same seed")
            return
        self._write(episode, submit)

    def _is_as_recorded(self, episode: Episode, answer: Mapping[str, Any]) -> bool:
        """Whether an episode that was played again gave the opening, the observations and the rewards of its record."""
        if "opening" not in answer:  # it was not played again
            return True
        if tuple(answer["opening"]) != episode.group.prompt.opening:
            return False
        ids, turns = episode.rollout.token_ids, episode.rollout.turns
        return all(
            step["reward"] == turn.reward
            and self._dialogue.observation(step["messages"], ids[turn.end - 1])[0] == ids[turn.end : following.start]
            for step, turn, following in zip(answer["steps"], turns, turns[1:])
        )

    def _continue(self, episode: Episode, step: Mapping[str, Any], submit: Submit) -> None:
        """End the episode, or append the observation and let the model write on."""
        episode.record(step)
        action = episode.actions[-1]
        most = episode.group.request.params.max_tokens
        if step["done"] or step["truncated"]:
            answered = self._dialogue.has_tools and not action.tool_calls and not step["truncated"]
            self._finish(episode, "stop" if answered else "environment")
        elif action.was_cut:
            self._finish(episode, "length")
        elif self._dialogue.settings.ends_after(len(episode.actions)):
            self._finish(episode, "turns")
        elif not step["messages"]:
            self._fail(episode, "step returned neither messages nor done=True")
        else:
            tokens, num_cut = self._dialogue.observation(step["messages"], episode.rollout.token_ids[-1])
            if len(episode.rollout.token_ids) + len(tokens) >= most:
                self._finish(episode, "length")
            else:
                episode.observe(tokens, num_cut)
                self._write(episode, submit)

    def _fail(self, episode: Episode, reason: str) -> None:
        """The environment failed: the rollout ends without a reward."""
        number = episode.number[1]
        self._finish(
            episode,
            "environment",
            f"the environment failed on row {episode.group.prompt.uid!r}, response {number}: {reason}",
        )

    def _finish(self, episode: Episode, reason: FinishReason, failure: str | None = None) -> None:
        episode.finish(reason, failure)
        self._pool.end(episode.key)
        self._engine.release(*episode.number)

    def _abandon(self, group: EpisodeGroup) -> None:
        """Give up a group whose environment did not repeat itself; it is generated anew when the engine is rid of it."""
        self.counts.diverged += 1
        group.diverged = True
        for episode in group.episodes:
            self._pool.end(episode.key)
            self._engine.release(*episode.number)
            if episode.state != "writing":
                episode.state = "over"

    def _restart_diverged(self, groups: Iterable[EpisodeGroup], submit: Submit) -> None:
        """Begin abandoned groups again, of which the engine has nothing any more."""
        for group in groups:
            if group.diverged and all(episode.state == "over" for episode in group.episodes):
                group.restart(self._dialogue)
                self._begin(group, submit)

    def _take_finished(self) -> list[Group]:
        over = [group for group in self._groups if group.is_over]
        self._groups = [group for group in self._groups if not group.is_over]
        return sorted((group.group() for group in over), key=lambda group: group.submission)


def _check_continued(episode: Episode, rollout: Rollout) -> None:
    """Refuse an engine that began a response again which it should have continued."""
    begun = episode.rollout.token_ids
    is_longer = len(rollout.token_ids) > len(begun) or episode.has_unread_turn
    if rollout.token_ids[: len(begun)] != begun or not is_longer:
        raise EngineError(
            f"prompt {episode.group.prompt.uid!r}: the rollout engine did not continue a partial response; environments "
            "need an engine that starts from GroupRequest.partial"
        )
