"""Whatever bytes come, an event or a refusal comes out of the codec, in good time, and never anything else."""

from __future__ import annotations

import json
import random
import re
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any, get_args

import msgspec
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chat_server.core.client_events import AnyClientEvent
from chat_server.core.codec import BadEvent, decode
from chat_server.core.server_events import Error, ErrorBody, encode
from tests.core.client_frames import IGNORED, VALID, event, json_values, mutated_events, places

pytestmark = pytest.mark.pure

CODES = {"invalid_json", "invalid_value", "missing_required_parameter", "unknown_parameter", "unsupported"}
EVENTS = get_args(AnyClientEvent)
KINDS = sorted(VALID)
#: What a hostile or broken client puts between right bytes, or in their place.
SCRAPS = [
    *(b'"', b"\\", b"{", b"}", b"[", b"]", b",", b":", b"\x00", b"\xff", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\n", b" "),
    *(b"\\u0000", b"\\ud800", b"NaN", b"1e999", b"[" * 2000, b'{"a":' * 2000, b'"type":"ping",', b'"session":{', b"`"),
]
#: What it says in the place of a name or a value.
VALUES = [
    *(b"null", b"true", b"-0", b"1e5", b"0.1", b"9" * 30, b'""', b"{}", b"[]", b"[[{}]]", b'"\\ud83d\\ude00"'),
    *(b'"type"', b'"root"', b'"event_id"', b'"function_call"', b'"input_audio"', b'"input_audio_buffer.append"'),
]
TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|[-\d.]+|null|\[\]')


def outcome(frame: str | bytes) -> AnyClientEvent | BadEvent:
    """What comes of a frame; fails unless it is one of our events, or a refusal that can be sent as it is."""
    try:
        decoded: AnyClientEvent = decode(frame)
    except BadEvent as error:
        assert error.code in CODES
        assert 10 < len(error.message) < 400
        assert error.param is None or len(error.param) < 200
        assert error.event_id is None or len(error.event_id) <= 512
        body = ErrorBody(
            type=error.type, code=error.code, message=error.message, param=error.param, event_id=error.event_id
        )
        told = json.loads(encode(Error(error=body)))["error"]
        assert (told["code"], told["message"], told["param"]) == (error.code, error.message, error.param)
        return error
    assert type(decoded) in EVENTS
    msgspec.json.encode(decoded).decode()  # all text in it can be stored and told
    return decoded


def spoilt(dice: random.Random) -> bytes:
    """A right event with other values here and there; or with bytes changed, doubled, cut out, or put between."""
    frame = bytearray(json.dumps(event(dice.choice(KINDS), event_id="mine"), ensure_ascii=dice.random() < 0.5).encode())
    by_token = dice.random() < 0.7
    for _ in range(dice.randrange(1, 4)):
        if by_token:
            at, end = dice.choice([match.span() for match in TOKEN.finditer(frame)])
            frame[at:end] = dice.choice(VALUES)
            continue
        at, size = dice.randrange(len(frame) + 1), dice.randrange(1, 20)
        match dice.randrange(5):
            case 0:
                frame[at : at + 1] = dice.randbytes(1)
            case 1:
                frame[at : at + size] = b""
            case 2:
                frame[at:at] = frame[at : at + size]
            case 3:
                frame[at : at + dice.choice([0, size])] = dice.choice(SCRAPS)
            case _:
                del frame[at + 1 :]
    return bytes(frame)


def test_spoilt_frames_are_decoded_or_refused() -> None:
    """Thousands of them: neither another exception, nor a refusal that could not be sent."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    counts: Counter[str] = Counter()
    for _ in range(5000):
        frame = spoilt(dice)
        try:
            came = outcome(frame)
        except BaseException:
            print(f"the frame was {frame!r}")
            raise
        counts[came.code if isinstance(came, BadEvent) else type(came).__name__] += 1
    print(dict(counts))
    assert counts.keys() >= CODES, "it does not try all that can go wrong"
    assert {kind.__name__ for kind in EVENTS} <= counts.keys(), "it spoils too much"


@settings(max_examples=200)
@given(st.one_of(st.binary(max_size=200), st.text(st.characters(), max_size=100)))
def test_noise_is_refused(frame: str | bytes) -> None:
    """Text with lone surrogates too, which no frame holds but a caller may."""
    assert isinstance(outcome(frame), BadEvent)


@settings(max_examples=200)
@given(mutated_events())
def test_text_and_bytes_have_the_same_outcome(mutant: dict[str, Any]) -> None:
    """And so has the frame with other white space, or with its characters escaped or not."""
    forms = [json.dumps(mutant), json.dumps(mutant, ensure_ascii=False), json.dumps(mutant, indent=3)]
    if not forms[1].isascii() and any("\ud800" <= char <= "\udfff" for char in forms[1]):
        forms = [forms[0], forms[2]]  # there is no such text in UTF-8
    first, *others = [outcome(form) for text in forms for form in (text, text.encode())]
    for other in others:
        if isinstance(first, BadEvent):
            assert isinstance(other, BadEvent)
            assert (other.code, other.message, other.param) == (first.code, first.message, first.param)
        else:
            assert other == first


@settings(max_examples=100)
@given(st.data())
def test_what_was_decoded_decodes_again_to_itself(data: st.DataObject) -> None:
    """An event holds all that its frame said, and nothing that a frame could not say."""
    kind = data.draw(st.sampled_from(KINDS))
    mutant = event(kind)
    *way, last = data.draw(st.sampled_from(places(mutant)[1:]))
    parent: Any = mutant
    for key in way:
        parent = parent[key]
    parent[last] = data.draw(st.one_of(st.text(max_size=5), st.integers(0, 3), st.floats(0, 1), st.none(), json_values))
    try:
        decoded = outcome(json.dumps(mutant))
    except UnicodeEncodeError:
        raise AssertionError("text that can not be stored was let in") from None
    if not isinstance(decoded, BadEvent):
        assert outcome(msgspec.json.encode(decoded)) == decoded


@settings(max_examples=100)
@given(st.sampled_from(sorted(IGNORED)), json_values)
def test_what_is_ignored_may_be_anything(kind: str, value: Any) -> None:
    """But it has to be JSON."""
    body = {"session.update": "session", "response.create": "response"}[kind]
    for name, _ in IGNORED[kind]:
        came = outcome(json.dumps(event(kind, **{body: {name: value}})))
        assert not isinstance(came, BadEvent) or came.code == "invalid_json"


@settings(max_examples=100)
@given(st.just("") | st.text(max_size=200).map("?".__add__), st.sampled_from(["", "session", "session.flush"]))
def test_an_unknown_field_is_named_whatever_its_name(name: str, inside: str) -> None:
    """By its path; a name that ends as our own messages do is only said to be unknown."""
    for field in (
        name,
        f"{name}` - at `$",
        f"{name} - at `$.{name}`",
        f"{name}` - at `$.session",
        f"` - at `key` in `$.{name}",
    ):
        came = outcome(json.dumps(within(inside, {field: 1})))
        assert isinstance(came, BadEvent)
        assert (came.code, came.event_id) == ("unknown_parameter", "e")
        if " - at `$." not in field and "` in `$." not in field:
            assert came.param == (f"{inside}.{field[:64]}" if inside else field[:64])


def within(path: str, value: dict[str, Any]) -> dict[str, Any]:
    """An event with these fields at a path."""
    for part in reversed(path.split(".")) if path else ():
        value = {part: value}
    return {"type": "session.update", "event_id": "e", "session": {}} | value


SIZE = 1 << 20
#: what stands before a great deal, that, and what stands behind it
LARGE = {
    "a long name": ('{"type":"ping","', "x" * SIZE, '":1}'),
    "a long name like our message": ('{"type":"ping","', " - at `$" * (SIZE // 8), '":1}'),
    "a long name, nested": ('{"type":"session.update","session":{"', " - at" * (SIZE // 5), '":1}}'),
    "a long value": ('{"type":"session.update","session":{"type":"', " - at `$.x" * (SIZE // 10), '"}}'),
    "a long id": ('{"type":"conversation.item.delete","item_id":"', "x" * SIZE, ' "}'),
    "a long type": ('{"type":"', "x" * SIZE, '"}'),
    "a long number": ('{"type":"ping","t":', "1" * SIZE, "}"),
    "a long fraction": ('{"type":"ping","t":0.', "0" * SIZE, "1}"),
    "many names": ('{"type":"ping",', ",".join(f'"{n}":1' for n in range(SIZE // 12)), "}"),
    "the same name": ('{"type":"ping",', ",".join(['"t":1'] * (SIZE // 6)), "}"),
    "many parts": ('{"type":"conversation.item.create","item":{"content":[', ",".join("1" * (SIZE // 2)), "]}}"),
    "escapes": ('{"type":"ping","event_id":"', "\\u0041" * (SIZE // 6), '"}'),
    "depth": ("", "[" * SIZE, ""),
    "white space": ("", " " * SIZE, ""),
}


@pytest.mark.parametrize("name", LARGE)
def test_a_large_frame_costs_little_more_than_to_parse_it(name: str) -> None:
    """Whatever it holds: everybody else waits meanwhile."""
    frame = "".join(LARGE[name])
    parse = min(_cpu_s(lambda: orjson.loads(frame)) for _ in range(3))
    cost = min(_cpu_s(lambda: outcome(frame)) for _ in range(3))
    assert cost < 4 * parse + 0.02


def _cpu_s(work: Callable[[], object]) -> float:
    began = time.process_time()
    with suppress(orjson.JSONDecodeError):
        work()
    return time.process_time() - began
