"""What a replica writes again when the store lost it: sessions of answers that are made here, or ended just now."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from chat_server.core.response import State
from chat_server.store.replies import Held, Snapshot
from tests.hubs import BROKEN, PlayedCommitter, PlayedStore, make_here, restorer_of, running_hub, until

pytestmark = pytest.mark.pure


@pytest.mark.parametrize("trouble", BROKEN)
async def test_an_answer_that_can_not_be_written_again_is_left(trouble: Exception) -> None:
    """It does not wait for ever, and nothing else ends by it."""
    store, committer = PlayedStore(), PlayedCommitter()
    async with running_hub(store) as hub:
        live = await make_here(hub, "a1")
        assert live.turn is not None
        store.troubles = {"a1": trouble}
        restorer_of(hub, store, committer).refused(live, live.turn, "missing")
        await until(lambda: committer.lost == [live.turn.writer] if live.turn else False)


async def test_text_on_its_way_to_a_store_that_loses_it_is_written_again_too() -> None:
    """The answer that says that it is stored may come later, from the store as it was: then it is told."""
    store, committer = PlayedStore(), PlayedCommitter()
    written: list[Snapshot] = []

    async def restore(session_id: str, snapshot: Snapshot) -> bool:
        written.append(snapshot)
        return True

    store.restore = restore  # type: ignore[method-assign, assignment]
    async with running_hub(store) as hub:
        live = await make_here(hub, "a1")
        assert live.turn is not None
        response = live.turn.response
        response.move(State.PREFILL)
        response.on_text("Hello")
        response.take_commit()
        response.stored_in_flight()
        response.on_text(" you there")
        under_way = response.take_commit()
        assert await restorer_of(hub, store, committer).write_again(live)
    assert under_way is not None
    assert under_way.text
    assert [snapshot.text for snapshot in written] == [response.text(0) + under_way.text]


async def test_an_answer_that_is_written_again_is_looked_after() -> None:
    """The store may have lost that somebody has to: an answer that nobody makes yet would wait for ever."""
    store, committer = PlayedStore(), PlayedCommitter()
    confirmed: list[list[str]] = []

    async def restore(session_id: str, snapshot: Snapshot) -> bool:
        confirmed.append(list(store.replicas.confirmed))
        return True

    store.restore = restore  # type: ignore[method-assign, assignment]
    async with running_hub(store) as hub:
        live = await make_here(hub, "a1")
        assert await restorer_of(hub, store, committer).write_again(live)
    assert confirmed == [["a1"]]


@pytest.mark.parametrize(("holds", "again"), [(Held(10, 4), True), (Held(11, 4), True), (Held(10, 5), False)])
async def test_text_that_the_store_lost_need_not_wait_for_more_of_it(holds: Held, again: bool) -> None:
    """The engine thinks, or a commit hangs: who comes meanwhile, or takes over, reads all that was told."""
    store, committer = PlayedStore(), PlayedCommitter()

    async def held(session_ids: Sequence[str]) -> list[Held | None]:
        return [holds for _ in session_ids]

    store.held = held  # type: ignore[method-assign]
    async with running_hub(store) as hub:
        live = await make_here(hub, "a1")
        assert live.turn is not None
        response = live.turn.response
        response.move(State.PREFILL)
        response.on_text("Hello ")
        response.take_commit()
        response.stored_in_flight()
        assert response.byte_length == 5
        await restorer_of(hub, store, committer).check_kept()
        assert committer.stored_again == [live.turn.writer] * again
