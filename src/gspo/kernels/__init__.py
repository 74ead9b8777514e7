"""Faster ways to run parts of a transformers model: C++ on CPUs, Triton and flash attention on GPUs, compiled layers."""


class UnsupportedModel(ValueError):
    """The model computes something that our code would leave out or cannot reproduce."""
