"""``chat-server simulate-engine``, which is also ``python -m chat_server.engine.simulated``."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import Any

import click
import orjson

from chat_server.engine.simulated.engine import EngineDied
from chat_server.engine.simulated.options import Fault, SimulatedOptions
from chat_server.engine.simulated.server import serve_simulated

DEFAULTS = SimulatedOptions()


def _faults(_context: click.Context, _param: click.Parameter, values: tuple[str, ...]) -> tuple[Fault, ...]:
    try:
        return tuple(Fault.parse(orjson.loads(value)) for value in values)
    except ValueError as error:
        raise click.BadParameter(f'{error}. Example: --fault \'{{"kind": "cut", "after_tokens": 5}}\'') from None


@click.command("simulate-engine", context_settings={"show_default": True})
@click.option("--host", default="127.0.0.1", help="Address to listen on.")
@click.option("--port", default=8001, type=click.IntRange(0, 65535), help="Port to listen on; 0 takes a free one.")
@click.option("--model", default=DEFAULTS.model, help="Name of the model that it serves.")
@click.option("--max-model-len", default=DEFAULTS.max_model_len, type=click.IntRange(1), help="Context window, tokens.")
@click.option(
    "--tokens-per-s",
    default=DEFAULTS.tokens_per_s,
    type=click.FloatRange(0),
    help="Speed of one answer; 0: as fast as it goes.",
)
@click.option(
    "--prefill-tokens-per-s",
    default=DEFAULTS.prefill_tokens_per_s,
    type=click.FloatRange(0),
    help="Speed at which prompts are computed, all together; 0: at once.",
)
@click.option(
    "--first-token-s",
    default=DEFAULTS.first_token_s,
    type=click.FloatRange(0),
    help="Seconds to the first token, besides that.",
)
@click.option("--tokens-per-chunk", default=DEFAULTS.tokens_per_chunk, type=click.IntRange(1), help="Tokens per event.")
@click.option("--max-running", default=DEFAULTS.max_running, type=click.IntRange(1), help="Requests side by side.")
@click.option(
    "--max-unfinished",
    default=DEFAULTS.max_unfinished,
    type=click.IntRange(0),
    help="Requests above which it says 503; 0: never.",
)
@click.option("--cache-blocks", default=DEFAULTS.cache_blocks, type=click.IntRange(1), help="Blocks of prefix cache.")
@click.option("--block-size", default=DEFAULTS.block_size, type=click.IntRange(1), help="Tokens per block.")
@click.option("--words", default=DEFAULTS.words, type=click.IntRange(0), help="Words of an answer; 0: some hundred.")
@click.option(
    "--reasoning-tokens",
    default=DEFAULTS.reasoning_tokens,
    type=click.IntRange(0),
    help="Tokens of reasoning before an answer.",
)
@click.option("--vary", is_flag=True, help="Each attempt writes other text, with its own mark in each word.")
@click.option("--api-key", help="If given, /v1 wants it as bearer token.")
@click.option("--fault", "faults", multiple=True, callback=_faults, help="A fault in JSON; repeatable.")
def simulate_engine(host: str, port: int, **values: Any) -> None:
    """Run an engine without a model, for front-end work and tests: it speaks vLLM's HTTP API."""
    options = SimulatedOptions(**values)
    try:
        asyncio.run(_serve(options, host, port))
    except EngineDied as error:
        click.echo(f"{error}.", err=True)
        sys.exit(1)
    except OSError as error:
        # asyncio puts a long text of its own into strerror; below 0 are the numbers of name look-ups.
        number = error.errno or 0
        reason = os.strerror(number) if number > 0 else str(error)
        raise click.ClickException(f"Cannot listen on {host}:{port}: {reason}.") from None
    except (KeyboardInterrupt, asyncio.CancelledError):
        pass  # told to stop


async def _serve(options: SimulatedOptions, host: str, port: int) -> None:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    await serve_simulated(
        options, host, port, on_listening=lambda url: click.echo(f"Simulated engine ({options.model}) on {url}")
    )
