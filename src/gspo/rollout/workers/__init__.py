"""Rollout workers in processes of their own, and the fleets that make one engine of them."""
