"""How a simulated engine behaves, and the faults it can show."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, get_args

FaultKind = Literal["die", "hang", "cut", "end", "abort", "error", "status", "health"]


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that goes wrong, on demand. It hits the next ``times`` requests, or with None all until cleared.

    ``die``     the process ends
    ``hang``    the stream goes silent and stays open
    ``cut``     the connection is reset
    ``end``     the stream ends as if whole, but without finish reason and ``[DONE]``
    ``abort``   the stream ends in order, with finish reason ``abort``: the engine gave the answer up
    ``error``   an error object with ``status`` inside the stream, as vLLM sends it
    ``status``  the request is answered with ``status``
    ``health``  ``/health`` is answered with ``status``; hits the next ``times`` probes

    The first six happen after ``after_tokens`` tokens, reasoning included (0: before the first, when the prompt is
    computed), or at the end of an answer that has fewer.
    """

    kind: FaultKind
    after_tokens: int = 0
    status: int = 503
    message: str = "simulated fault"
    times: int | None = 1

    @classmethod
    def parse(cls, values: object) -> Fault:
        """A fault out of JSON. Raises ValueError that says what is wrong."""
        if not isinstance(values, dict):
            raise ValueError("a fault is an object")
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(values) - known):
            raise ValueError(f"a fault has no {', '.join(unknown)}; it has {', '.join(sorted(known))}")
        if values.get("kind") not in get_args(FaultKind):
            raise ValueError(f"kind is one of {', '.join(get_args(FaultKind))}")
        for name in ("after_tokens", "status", "times"):
            value = values.get(name, 0)
            if not isinstance(value, int) and not (name == "times" and value is None):
                raise ValueError(f"{name} is a whole number")
        if not isinstance(values.get("message", ""), str):
            raise ValueError("message is a string")
        return cls(**values)


@dataclass(frozen=True, slots=True)
class SimulatedOptions:
    """Speeds are per second; a speed of 0 means as fast as it goes."""

    model: str = "simulated"
    #: tokens of the context window
    max_model_len: int = 8192
    #: tokens per second of one answer
    tokens_per_s: float = 40.0
    #: prompt tokens per second that are computed, over all requests together: they queue up as on a real engine
    prefill_tokens_per_s: float = 5000.0
    #: seconds to the first token besides the prefill
    first_token_s: float = 0.02
    #: tokens in one event of the stream
    tokens_per_chunk: int = 1
    #: requests that run side by side; the others wait
    max_running: int = 256
    #: unfinished requests (running and waiting) above which a new one is refused with 503; 0: no bound
    max_unfinished: int = 0
    #: blocks of the prefix cache, and tokens per block. As many tokens as the CPU demo has.
    cache_blocks: int = 1456
    block_size: int = 32
    #: words of an answer, if the message does not ask for a number; 0: what the text needs
    words: int = 0
    #: tokens of reasoning before the answer
    reasoning_tokens: int = 0
    #: the field it comes in: vLLM's is ``reasoning``, older ones and others write ``reasoning_content``
    reasoning_field: Literal["reasoning", "reasoning_content"] = "reasoning"
    #: each attempt writes other text, with its own mark in each word, so that a mixture of two shows
    vary: bool = False
    #: if set, ``/v1`` wants it as bearer token
    api_key: str | None = None
    faults: tuple[Fault, ...] = ()
