"""A server that has answered ten thousand requests holds no more than after the first thousand."""

from __future__ import annotations

import asyncio
import gc
import resource

import pytest

from tests.serving.support import embedded, running


@pytest.mark.slow
def test_memory_is_constant_over_ten_thousand_requests() -> None:
    with running(embedded(num_slots=32, max_length=64), api_key=None) as server:

        async def ask(num: int) -> None:
            async with server.async_client() as client:
                gate = asyncio.Semaphore(48)

                async def one(number: int) -> None:
                    async with gate:
                        options = {
                            "model": "embedded",
                            "prompt": f"{number}+1=",
                            "max_tokens": 4,
                            "temperature": 1 + number / 1e4,
                        }
                        if number % 5:
                            await client.completions.create(**options)
                            return
                        stream = await client.completions.create(**options, stream=True, logprobs=2, stop=["9"])
                        async for _ in stream:
                            if number % 15 == 0:
                                break  # leaves in the middle
                        await stream.close()

                await asyncio.gather(*(one(number) for number in range(num)))

        def used() -> int:
            gc.collect()
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB

        asyncio.run(ask(2000))
        before = used()
        for _ in range(4):
            asyncio.run(ask(2000))
        assert used() - before < 48 * 1024, "KiB"
        assert server.batcher.num_open == 0
        assert server.batcher.counts.failures == 0
