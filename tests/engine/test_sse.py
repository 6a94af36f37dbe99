"""Server-sent events: any chunking, any line end, and the bound."""

from __future__ import annotations

import re
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chat_server.engine.sse import EventTooLarge, SseParser

pytestmark = pytest.mark.pure

# Whatever an event may hold but line ends, which are the format's own.
values = st.binary(max_size=30).map(lambda b: b.replace(b"\n", b"").replace(b"\r", b""))
line_ends = st.sampled_from([b"\n", b"\r\n"])
noise = st.sampled_from([b": keep-alive", b":", b"event: x", b"id: 7", b"retry: 10", b"data", b"database: no"])


@st.composite
def streams(draw: st.DrawFn) -> tuple[bytes, list[bytes]]:
    """A stream, and the events in it."""
    stream = b""
    expected = []
    for lines in draw(st.lists(st.lists(values, min_size=1, max_size=3), max_size=6)):
        for line in lines:
            for extra in draw(st.lists(noise, max_size=2)):
                stream += extra + draw(line_ends)
            stream += b"data: " + line + draw(line_ends)
        stream += draw(line_ends)
        expected.append(b"\n".join(lines))
    return stream, expected


def read(pieces: Iterable[bytes], parser: SseParser) -> list[bytes]:
    return [event for piece in pieces for event in parser.feed(piece)]


@given(streams(), st.data())
def test_any_chunking_gives_the_same_events(stream: tuple[bytes, list[bytes]], data: st.DataObject) -> None:
    """Where the network cuts the bytes does not matter: not in a line end, not in a character."""
    raw, expected = stream
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=10)))
    pieces = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    assert read(pieces, SseParser()) == expected


@given(streams())
def test_line_by_line_gives_the_same_events(stream: tuple[bytes, list[bytes]]) -> None:
    """Cut where engines cut: behind each line, and behind each event."""
    raw, expected = stream
    assert read(raw.splitlines(keepends=True), SseParser()) == expected
    assert read(re.findall(rb".*?\n\n|.+", raw, re.DOTALL), SseParser()) == expected


@given(streams())
def test_byte_by_byte_gives_the_same_events(stream: tuple[bytes, list[bytes]]) -> None:
    """The finest chunking of all."""
    raw, expected = stream
    assert read((raw[i : i + 1] for i in range(len(raw))), SseParser()) == expected


@given(st.binary(max_size=60), st.data())
def test_any_bytes_are_read_alike_however_cut(raw: bytes, data: st.DataObject) -> None:
    """Also of what is no proper stream, events and the refusal do not depend on the chunking."""

    def outcome(pieces: list[bytes]) -> tuple[list[bytes], bool]:
        parser = SseParser(max_event_bytes=20)
        events = []
        try:
            for piece in pieces:
                events += parser.feed(piece)
        except EventTooLarge:
            return [], True
        return events, False

    cut = data.draw(st.integers(0, len(raw)))
    assert outcome([raw[:cut], raw[cut:]]) == outcome([raw]) == outcome([bytes([b]) for b in raw])


def test_one_space_after_the_colon_is_no_part_of_the_data() -> None:
    """``data:x`` and ``data: x`` are the same; a second space counts."""
    assert SseParser().feed(b"data:x\n\ndata: x\n\ndata:  x\n\n") == [b"x", b"x", b" x"]


def test_an_event_without_its_blank_line_is_not_told() -> None:
    """It may be cut: only the blank line says that it is whole."""
    parser = SseParser()
    assert parser.feed(b"data: half\n") == []
    assert parser.feed(b"\n") == [b"half"]


def test_blank_lines_alone_are_no_events() -> None:
    """A keep-alive comment and its blank line tell nothing."""
    assert SseParser().feed(b"\n\n: keep-alive\n\n\n") == []


@pytest.mark.parametrize(
    "raw", [b"data: 456789", b"data: 4567890\n", b"data: 1\ndata: 2", b":234567890x", b":234567890x\n\n"]
)
def test_what_passes_the_bound_is_refused(raw: bytes) -> None:
    """A line or an event of more bytes than allowed is an error, however it comes, and not a growing buffer."""
    with pytest.raises(EventTooLarge, match="larger than 10 bytes"):
        SseParser(max_event_bytes=10).feed(raw)
    parser = SseParser(max_event_bytes=10)
    with pytest.raises(EventTooLarge):
        for i in range(len(raw)):
            parser.feed(raw[i : i + 1])


def test_the_bound_is_for_one_event_and_not_for_the_stream() -> None:
    """Any number of events that fit may follow each other."""
    assert SseParser(max_event_bytes=10).feed(b"data: 4567\r\n\r\n" * 100) == [b"4567"] * 100
