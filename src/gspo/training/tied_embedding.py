"""The gradient of an embedding that is the output layer's weight as well, without a tensor of its own on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from gspo.models.head import Head

FLOAT = 4  # bytes
MIN_ELEMENTS = 1 << 20  # of a weight whose zeros cost more than the bookkeeping of rows


@contextmanager
def added_in_place(decoder: Any, head: Head) -> Iterator[None]:
    """Within this a backward adds the rows of the tokens to the output layer's gradient, where the two share a weight.

    Otherwise autograd fills a gradient of the whole vocabulary with zeros and adds all of it. Only around backwards
    that reach the output layer: an embedding's gradient alone would be left as rows. In half precision every row that
    is added rounds the sum again, so there it stays as it is.
    """
    embedding, weight = decoder.get_input_embeddings(), head.linear.weight
    shares = isinstance(embedding, nn.Embedding) and embedding.weight is weight and not embedding.sparse
    pays = weight.device.type == "cpu" and weight.itemsize >= FLOAT and weight.numel() >= MIN_ELEMENTS
    if not (shares and pays):
        yield
        return
    embedding.sparse = True
    try:
        yield
    finally:
        embedding.sparse = False
