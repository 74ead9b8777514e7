"""Episodes: rollouts of several turns, on any rollout engine."""
