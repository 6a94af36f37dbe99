"""The page's JavaScript modules without a server: an empty page that finds them, and events as a server tells them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from playwright.async_api import Browser, Page, Route

STATIC = Path(__file__).parents[2] / "static"


@asynccontextmanager
async def empty_page(browser: Browser) -> AsyncIterator[Page]:
    """An empty page that finds our modules under ``/static/``; there is no server."""

    async def serve(route: Route) -> None:
        name = route.request.url.partition("/static/")[2]
        if name:
            await route.fulfill(body=(STATIC / name).read_text(), content_type="text/javascript")
        else:
            await route.fulfill(body="<!doctype html>", content_type="text/html")

    page = await browser.new_page()
    try:
        await page.route("**/*", serve)
        await page.goto("http://page.invalid/")
        yield page
    finally:
        await page.close()


async def run(page: Page, module: str, code: str, argument: object = None) -> Any:
    """What the function body ``code`` returns; it has the module as ``m`` and the argument as ``x``."""
    return await page.evaluate(f"async (x) => {{ const m = await import('/static/{module}'); {code} }}", argument)


def message(id: str, text: str, role: str = "user", **fields: Any) -> dict[str, Any]:
    content = [{"type": "output_text" if role == "assistant" else "input_text", "text": text}] if text else []
    return {"id": id, "type": "message", "role": role, "status": "completed", "content": content, **fields}


def told(item: dict[str, Any], after: str | None) -> list[dict[str, Any]]:
    kinds = ("conversation.item.added", "conversation.item.done")
    return [{"type": kind, "item": item, "previous_item_id": after} for kind in kinds]


def created(items: int, active: dict[str, Any] | None = None) -> dict[str, Any]:
    session = {"id": "sess_1", "model": "m"}
    return {"type": "session.created", "session": session, "item_count": items, "active_response": active}


def running_answer(answer: str, after: str, reply_to: str, text: str) -> list[dict[str, Any]]:
    """The beginning of an answer as it is told when it is new, with some text."""
    begun = message(f"i{answer}", "", "assistant", status="in_progress", response_id=answer)
    return [
        {"type": "response.created", "response": {"id": answer, "status": "in_progress"}, "in_reply_to": reply_to},
        {"type": "response.output_item.added", "response_id": answer, "item": begun},
        {"type": "conversation.item.added", "item": begun, "previous_item_id": after},
        *([delta(answer, 0, text)] if text else []),
    ]


def delta(answer: str, offset: int, text: str, epoch: str = "e") -> dict[str, Any]:
    ids = {"response_id": answer, "item_id": f"i{answer}", "epoch": epoch}
    return {"type": "response.output_text.delta", **ids, "offset": offset, "delta": text}


def end(answer: str, text: str | None, after: str, status: str = "completed", **details: Any) -> list[dict[str, Any]]:
    """The end of an answer; without ``text`` it leaves nothing."""
    item = message(f"i{answer}", text or "", "assistant", response_id=answer)
    ids = {"response_id": answer, "item_id": item["id"]}
    whole = [{"type": "response.output_text.done", **ids, "text": text}] if text is not None else []
    gone = {"type": "conversation.item.deleted", "item_id": item["id"]}
    done = {"type": "conversation.item.done", "item": item, "previous_item_id": after}
    output = [] if text is None else [item]
    response = {"id": answer, "status": status, "status_details": details or None, "output": output}
    return [*whole, gone if text is None else done, {"type": "response.done", "response": response}]


ASKED = told(message("a", "hi"), None)
