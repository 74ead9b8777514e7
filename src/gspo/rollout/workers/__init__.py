"""Rollout workers in other processes, and the fleets that use them."""
