"""The page's client with a server that the test plays, event by event: a Stop and the answer's end that cross."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.async_api import Page

from tests.e2e.modules import ASKED, created, end, message, run, running_answer, told

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]

#: Plays the steps ``x``: "stop" presses it, the rest is told by the server; an error is about what was sent last.
PLAY = """
  const sent = [], faults = [];
  let last;
  window.WebSocket = class {
    static OPEN = 1;
    readyState = 1;
    constructor() { last = this; }
    send(data) { sent.push(JSON.parse(data)); }
    close() { this.readyState = 3; }
  };
  const client = new m.RealtimeClient({ url: 'ws://page.invalid/v1/realtime' });
  client.on('fault', (fault) => faults.push(fault.message));
  client.connect();
  for (const step of x) {
    if (step === 'stop') {
      client.stop();
    } else {
      if (step.type === 'error') step.error.event_id = sent.at(-1).event_id;
      last.onmessage({ data: JSON.stringify(step) });
    }
    await new Promise((done) => setTimeout(done, 5));
  }
  client.close();
  const item = client.conversation.item('ir');
  return {
    sent: sent.map((event) => [event.type.split('.').at(-1), event.seen ?? event.text_end ?? null]),
    text: item?.text ?? null,
    status: item?.status ?? null,
    busy: client.busy,
    faults,
  };
"""

BEGUN = [created(1), *ASKED, *running_answer("r", "a", "a", "Hel👋"), "stop"]
ENDED = end("r", "Hel👋lo", "a")
CUT = {"type": "conversation.item.truncated", "item_id": "ir", "text_end": 4}
GONE = {"type": "conversation.item.deleted", "item_id": "ir"}
RETRIEVED = {"type": "conversation.item.retrieved", "item": ENDED[1]["item"]}

SENT = [["cancel", 4], ["truncate", 4]]
SHORT = {"text": "Hel👋", "status": "incomplete"}
WHOLE = {"text": "Hel👋lo", "status": "completed"}


def error(code: str, *, retryable: bool = False) -> dict[str, Any]:
    return {"type": "error", "error": {"code": code, "message": code, "retryable": retryable, "retry_after_ms": 0}}


LATE = error("response_cancel_not_active")
AWAY = error("store_unavailable", retryable=True)


async def play(page: Page, *steps: Any) -> dict[str, Any]:
    played: dict[str, Any] = await run(page, "realtime.js", PLAY, [*BEGUN, *steps])
    assert not played.pop("busy"), "the next message can be sent"
    return played


@pytest.mark.parametrize("steps", [[LATE, *ENDED, CUT], [*ENDED, CUT], [*ENDED, LATE, CUT], [*ENDED, CUT, LATE]])
async def test_the_end_may_cross_the_stop_in_any_way(page: Page, steps: list[Any]) -> None:
    """The answer is cut once, to what was seen, and nothing is said of the Stop that was too late."""
    assert await play(page, *steps) == {"sent": SENT, **SHORT, "faults": []}


async def test_an_answer_that_was_seen_whole_is_whole(page: Page) -> None:
    """Stop was pressed after its last word and before its end: there is nothing to cut."""
    whole = {"text": "Hel👋", "status": "completed"}
    seen = await play(page, *end("r", "Hel👋", "a"), LATE)
    assert seen == {"sent": [["cancel", 4]], **whole, "faults": []}


async def test_a_stop_in_time_cuts_nothing_more(page: Page) -> None:
    """The server cut the text itself."""
    seen = await play(page, *end("r", "Hel👋", "a", "cancelled"))
    assert seen["sent"] == [["cancel", 4]]


async def test_the_cut_is_tried_again_while_the_store_is_away(page: Page) -> None:
    """Until it is there, or for so long that it makes no sense: then all of the answer is shown, and why."""
    again = [LATE, AWAY]
    seen = await play(page, *ENDED, AWAY, *again, LATE, CUT)
    assert seen == {"sent": SENT * 3, **SHORT, "faults": []}
    seen = await play(page, *ENDED, AWAY, *again * 5, RETRIEVED)
    assert seen == {"sent": [*SENT * 6, ["retrieve", None]], **WHOLE, "faults": ["store_unavailable"]}


async def test_another_tab_may_cut_it_first(page: Page) -> None:
    """Shorter: that holds, and our own cut, which can not be, is not told to anybody. Longer: ours comes after it."""
    shorter, longer = {**CUT, "text_end": 2}, {**CUT, "text_end": 5}
    seen = await play(page, *ENDED, shorter, error("invalid_value"))
    assert seen == {"sent": SENT, "text": "He", "status": "incomplete", "faults": []}
    assert await play(page, *ENDED, longer, CUT) == {"sent": SENT, **SHORT, "faults": []}


async def test_another_tab_may_delete_it_first(page: Page) -> None:
    """Then nothing of it is shown, whichever is heard first: that it is gone, or that it can not be cut."""
    for steps in ([GONE, error("item_not_found")], [error("item_not_found"), GONE]):
        seen = await play(page, *ENDED, *steps)
        assert seen["sent"][:2] == SENT
        assert (seen["text"], seen["faults"]) == (None, [])


async def test_an_answer_that_others_followed_is_shown_whole(page: Page) -> None:
    """Known only when a new connection has told all: until then it is not cut."""
    more = told(message("b", "more"), "ir")
    seen = await play(page, created(3), *ASKED, *ENDED, *more, LATE, RETRIEVED)
    assert seen == {"sent": [["cancel", 4], ["cancel", 4], ["retrieve", None]], **WHOLE, "faults": []}


async def test_an_answer_of_which_nothing_is_known_any_more_is_not_waited_for(page: Page) -> None:
    """The store has lost it: the new connection does not tell of it, and there is nothing to stop."""
    seen = await play(page, created(1), *ASKED, LATE)
    assert seen == {"sent": [["cancel", 4]] * 2, "text": None, "status": None, "faults": []}
