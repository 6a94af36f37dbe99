"""Every place at which a server may leave an answer: whether it goes on from there as if it had never been cut."""

from __future__ import annotations

import asyncio
import time

import click

from chat_server.engine.vllm import VllmClient, open_http
from tests.vllm.continuation import ASKED, AT_A_TIME, STOP, Asking, Whole


@click.command()
@click.argument("url")
def main(url: str) -> None:
    """Go over all places of an answer of each kind, without and with a stop string, on the vLLM server at URL."""
    raise SystemExit(asyncio.run(_all(url.rstrip("/"))))


async def _all(url: str) -> bool:
    """Print the table; returns whether any answer went on in other words."""
    began = time.monotonic()
    failures: list[str] = []
    async with open_http() as http:
        client = VllmClient(http)
        (model,) = await client.models(url)
        asking = Asking(url, client, model.id)
        print(f"{'kind':24}{'places':>8}{'exact':>8}{'different':>11}{'exact at the second try':>26}", flush=True)
        for stop in ((), STOP):
            for kind, asked in ASKED.items():
                answer = await asking.whole(asked, stop)
                again, wrong = await _every_place(asking, answer)
                name, count = kind + ", stop string" * bool(stop), len(answer.places)
                print(f"{name:24}{count:8}{count - len(wrong):8}{len(wrong):11}{again:26}", flush=True)
                failures += [f"{name} at {cut}: {how}" for cut, how in wrong]
    print(f"{time.monotonic() - began:.0f} s", *failures, sep="\n")
    return bool(failures)


async def _every_place(asking: Asking, answer: Whole) -> tuple[int, list[tuple[int, str]]]:
    """How many places were exact only when tried alone, and those that were not even then."""
    limit = asyncio.Semaphore(AT_A_TIME)

    async def at(cut: int) -> bool:
        async with limit:
            return await asking.differs(answer, cut) is not None

    at_once = await asyncio.gather(*map(at, answer.places))
    suspects = [cut for cut, bad in zip(answer.places, at_once, strict=True) if bad]
    # What else is in its batch changes the last bits of a sum, and two words may be as likely as each other.
    alone = [(cut, await asking.differs(answer, cut)) for cut in suspects]
    wrong = [(cut, how) for cut, how in alone if how is not None]
    return len(suspects) - len(wrong), wrong


if __name__ == "__main__":
    main()
