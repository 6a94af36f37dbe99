"""What a simulated engine says, as a function of the prompt, and how it counts tokens.

Nothing here knows of an engine, so a test can compute what an answer has to be: ``answer_for(messages)``.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence

import xxhash

Message = Mapping[str, object]

#: Words of an answer when nobody asks for a number.
DEFAULT_WORDS = 110
MAX_WORDS = 20_000
#: A word of an attempt (see ``attempt_words``), a word or digits with the space before it, white space, or any one
#: code point: so characters made of several code points (emoji) are cut in the middle, as real tokens do.
_TOKEN = re.compile(r" ?[0-9a-z]+·\d+| ?[A-Za-z]{1,7}| ?\d{1,3}|\n\n|\s|.", re.DOTALL)
_ASKED_WORDS = re.compile(r"\b(\d{1,5}) words?\b", re.IGNORECASE)
_MARKED = re.compile(r"[0-9a-z]+·(\d+)")


def tokens(text: str) -> list[str]:
    """``text`` in tokens; joined they are the text again."""
    return _TOKEN.findall(text)


def content(message: Message) -> str:
    """The text of a message; of content in parts, the text parts."""
    value = message.get("content")
    if isinstance(value, str):
        return value
    parts = value if isinstance(value, list) else ()
    return "".join(str(part.get("text", "")) for part in parts if isinstance(part, dict))


def prompt_tokens(messages: Sequence[Message], *, continue_final: bool = False, generate: bool = True) -> list[str]:
    """The prompt as a chat template writes it, in tokens.

    With ``continue_final`` the last message stays open; else, with ``generate``, the assistant's turn is begun.
    """
    out: list[str] = []
    for place, message in enumerate(messages):
        out += ("<|im_start|>", str(message.get("role", "")), "\n", *tokens(content(message)))
        if not (continue_final and place == len(messages) - 1):
            out += ("<|im_end|>", "\n")
    if generate and not continue_final:
        out += ("<|im_start|>", "assistant", "\n")
    return out


def token_id(token: str) -> int:
    """A number for a token: the same on every engine."""
    return xxhash.xxh32_intdigest(token.encode("utf-8", "surrogatepass")) & 0x7FFFFFFF


def answer_for(messages: Sequence[Message], words: int = 0) -> str:
    """The whole answer to ``messages``, the last of which is the user's: readable, with all that makes text hard.

    About as many words as the last message asks for ("in 300 words"), else ``words``, else some hundred.
    """
    spoken = [m for m in messages if m.get("role") in ("user", "assistant")]
    asked = [content(m) for m in spoken if m.get("role") == "user"]
    system = " ".join(content(m) for m in messages if m.get("role") in ("system", "developer"))
    last = asked[-1] if asked else ""
    wish = _ASKED_WORDS.search(last)
    length = min(int(wish.group(1)) if wish else words or DEFAULT_WORDS, MAX_WORDS)
    seed = xxhash.xxh64_intdigest("\0".join([system, *map(content, spoken)]).encode("utf-8", "surrogatepass"))
    lines = [f"You wrote: “{_quote(last)}” 👩🏽‍💻", _memory(len(spoken) - 1, asked)]
    if system:
        lines.append(f"I was told: “{_quote(system)}”")
    out = ["\n".join(lines)]
    have = sum(len(line.split()) for line in lines)
    choose = random.Random(seed)
    part = 1
    while have < length:
        if part > 1:
            out.append(f"### Part {part}")
        for section in choose.sample(_SECTIONS, len(_SECTIONS)):
            if have >= length:
                break
            out.append(section)
            have += len(section.split())
        part += 1
    return "\n\n".join(out)


def attempt_words(attempt: str, start: int, count: int) -> str:
    """``count`` words from number ``start`` that all bear the mark of ``attempt`` (digits and lower case letters).

    So a hole, a repetition and a mixture of two attempts show themselves in the text.
    """
    return "".join(
        ("" if number == 1 else "\n\n" if number % 40 == 1 else " ") + f"{attempt}·{number}"
        for number in range(start, start + count)
    )


def continuation(answer: str, partial: str) -> str:
    """What follows ``partial`` in ``answer``.

    Of a ``partial`` that is not its beginning: what follows its length, from the next word on.
    """
    if answer.startswith(partial):
        return answer[len(partial) :]
    rest = answer[len(partial) :]
    return rest[max(rest.find(" "), 0) :]


def next_marked(partial: str) -> int:
    """The number after the last marked word of ``partial``."""
    return max((int(number) for number in _MARKED.findall(partial)), default=0) + 1


def _quote(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 120 else line[:119].rstrip() + "…"


def _memory(before: int, asked: Sequence[str]) -> str:
    if before < 1:
        return "It is the first message of our conversation."
    messages = "message" if before == 1 else "messages"
    return f"Before it came {before} {messages}; the first was “{_quote(asked[0])}”."


_SECTIONS = (
    "I am a **simulated** engine: no model runs here, and I answer with prepared text. Everything around me is real, "
    "from the socket to the store.",
    "A list, as models like them:\n\n- first, *say* what it is about\n- then the details, with `inline code`\n"
    "- and a [link](https://example.com/a?b=1&c=2)",
    "Steps to follow:\n\n1. Measure before you change anything.\n2. Change one thing.\n"
    "3. Measure again, e.g. 3.14 s against 2.72 s.",
    "```python\ndef greet(name: str) -> str:\n    # braces, quotes and a backslash\n"
    '    return f"Hello, {name}!\\n"\n```',
    "| part | state | 数 |\n|---|---|---:|\n| engine | running | 2 |\n| store | up | 1 |",
    "这是一段中文：流式输出时，每个字都可能单独到达。句子没有空格，标点是全角的。",
    "日本語も少し。「途中で切れても、同じところから続けられます。」とエンジンは言いました。",
    "Characters of several code points: 👨‍👩‍👧‍👦 👍🏿 🏳️‍🌈 🇨🇭 1️⃣ and e\u0301, which is an e and an accent.",
    "> A quotation, said by nobody: “What is stored can be told.”\n\nDr. Smith agrees, at 9 a.m. on the 3rd.",
    "शब्द और العربية और עברית stand side by side; whoever counts bytes, code points and letters as one is wrong.",
    "Is <b>this</b> bold? It must not be: text of a model is no markup. Nor is <img src=x onerror=alert(1)> a picture.",
    "A formula, $E = mc^2$, and a sentence that goes on for a while without coming to a point, because some readers "
    "want to see how a long line wraps on a narrow screen; it ends here.",
)
