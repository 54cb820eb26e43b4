"""rlsdk's scheduler saves vLLM work on the KV cache, with an identical cache."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlsdk.contracts import Request, Sampling

pytestmark = pytest.mark.stack
BLOCK = 64


def test_slots_are_asked_for_where_a_block_begins_or_ends_and_there_are_as_many_as_before(vllm_engine: Any) -> None:
    def body(engine: Any) -> tuple[int, list[tuple[int, int]], int]:
        scheduler = engine._llm.engine_core.engine_core.scheduler
        manager = scheduler.kv_cache_manager
        coordinator, calls, held = manager.coordinator, [], []
        own = coordinator.allocate_new_blocks
        coordinator.allocate_new_blocks = lambda *args, **how: calls.append(args) or own(*args, **how)
        engine.abort()
        free = manager.block_pool.get_num_free_blocks()
        try:
            sampling = Sampling(max_tokens=200, ignore_eos=True)
            engine.add([Request(id="r", prompt_ids=np.arange(20, 30), sampling=sampling)])
            while engine.unfinished:
                engine.step()
                held += [
                    (r.num_computed_tokens, len(manager.get_block_ids(r.request_id)[0])) for r in scheduler.running
                ]
        finally:
            del coordinator.allocate_new_blocks
        return len(calls), held, free - manager.block_pool.get_num_free_blocks()

    asked, held, kept = vllm_engine.run(body)
    assert asked == 1 + 2 * 3  # the prompt, and the 200 tokens behind it pass three ends of a block
    assert [tokens for tokens, _ in held] == list(range(10, 209))
    assert all(blocks == -(-tokens // BLOCK) for tokens, blocks in held)
    assert kept == 0


def test_a_prompt_longer_than_a_step_is_read_in_chunks() -> None:
    from vllm.v1.core.sched.request_queue import FCFSRequestQueue

    from rlsdk.engines.vllm_classes import DecodeScheduler

    queue = FCFSRequestQueue(["first", "canary"])
    held: Any = SimpleNamespace(running=[], requests={"c": "canary"}, waiting=queue, max_num_scheduled_tokens=8)
    for count, budget in ((5, 5), (20, 8)):  # its buffers hold no more
        with DecodeScheduler.before_others(held, "c", count):
            assert (queue[0], held.max_num_scheduled_tokens) == ("canary", budget)
        assert held.max_num_scheduled_tokens == 8
