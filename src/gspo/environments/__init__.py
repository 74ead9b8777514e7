"""Environments: what a rollout talks to between its turns. Tools, games, and the processes in which they run."""

from gspo.environments.protocol import Action, Environment, EnvironmentProblem, Message, Step, ToolCall

__all__ = ["Action", "Environment", "EnvironmentProblem", "Message", "Step", "ToolCall"]
