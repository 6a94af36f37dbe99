"""Why an engine ended, in the words of its log that matter, and what to do about it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

#: vLLM's "(EngineCore pid=12) ERROR 12-02 07:00:00 [core.py:1]" in front of a line
PREFIX = re.compile(r"^(\([^)]*\) )?((ERROR|WARNING|INFO|CRITICAL) [\d-]+ [\d:]+ \[[^\]]*\] ?)?")
#: the last line of a traceback: "ValueError: ...", "torch.OutOfMemoryError: ..."
RAISED = re.compile(r"^[\w.]*(Error|Exception|Exit|Interrupt)\b\S*: ")
#: vLLM's parent process only says that its child failed
WRAPPER = re.compile(r"Engine core initialization failed|See root cause above|EngineDeadError")

#: what is in the text -> what to do
ADVICE = (
    (r"out of memory|OutOfMemory|Cannot allocate memory|No available memory|free memory on device",
     "It needs more memory than there is: give --engines 1, a smaller --max-model-len, or a smaller --model."),
    (r"max_model_len|max seq len|maximum model length|KV cache",
     "Give a smaller --max-model-len."),
    (r"is not a local folder and is not a valid model identifier|Repository Not Found|gated repo|couldn't connect",
     "Look at the name given with --model, at the network, and at your access to the model."),
    (r"address already in use", "Another program took its port in that moment; start again."),
    (r"No module named|ImportError|does not exist|undefined symbol",
     "The installation of vLLM is broken: run `make install-engine` again, then `chat-server doctor`."),
)  # fmt: skip


def explain(name: str, status: int, lines: Sequence[str], log: Path, *, timed_out: bool = False) -> str:
    """One text for people: what happened, the lines that matter, what to do, where the log is."""
    said = what_matters(lines)
    text = "\n".join(said)
    if timed_out:
        happened = f"{name} did not get ready in time and was stopped"
    elif status == 137:
        happened = f"{name} was killed"
    elif status > 128:
        happened = f"{name} ended by signal {status - 128}"
    else:
        happened = f"{name} ended with status {status}"
    parts = [happened + (":" if said else " and said nothing.")]
    parts += [f"    {line}" for line in said]
    advice = next((advice for pattern, advice in ADVICE if re.search(pattern, text, re.IGNORECASE)), None)
    if status == 137 and advice is None and not timed_out:
        advice = "The system may have run out of memory: give --engines 1 or a smaller --model."
    if advice:
        parts.append(advice)
    parts.append(f"Its log: {log}")
    return "\n".join(parts)


def what_matters(lines: Sequence[str], most: int = 3) -> list[str]:
    """The errors that were raised, the last ones first to be kept, without doubles; else the last lines."""
    plain = [PREFIX.sub("", line).rstrip() for line in lines]
    found: list[str] = []
    for number, line in enumerate(plain):
        if RAISED.match(line) and not WRAPPER.search(line):
            if "validation error" in line and number + 1 < len(plain):  # pydantic's; the reason is on the next line
                line = plain[number + 1].strip().removeprefix("Value error, ")  # noqa: PLW2901
            found.append(clip(line))
    return list(dict.fromkeys(found))[-most:] or [clip(line) for line in plain if line.strip()][-most:]


def clip(line: str, most: int = 300) -> str:
    return line if len(line) <= most else line[: most - 1] + "…"
