"""From an engine's log to the words that help, on logs as vLLM writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from chat_server.engine.launch_errors import explain, what_matters

pytestmark = pytest.mark.pure

LOG = Path("/logs/engine-1.log")

TOO_LONG = """\
Traceback (most recent call last):
  File "<frozen runpy>", line 198, in _run_module_as_main
  File "/venv/vllm/entrypoints/openai/api_server.py", line 671, in <module>
    uvloop.run(run_server(args))
pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig
  Value error, User-specified max_model_len (99999) is greater than the derived max_model_len (8192). [type=value_error]
    For further information visit https://errors.pydantic.dev/2.14/v/value_error
""".splitlines()

IN_THE_CHILD = """\
(EngineCore pid=17) ERROR 12-02 07:00:01 [core.py:1102] EngineCore failed to start.
(EngineCore pid=17) ERROR 12-02 07:00:01 [core.py:1102] Traceback (most recent call last):
(EngineCore pid=17) ERROR 12-02 07:00:01 [core.py:1102]   File "/venv/vllm/v1/engine/core.py", line 1076, in run
(EngineCore pid=17) ERROR 12-02 07:00:01 [core.py:1102] ValueError: No available memory for the cache blocks.
(EngineCore pid=17) Process EngineCore:
(APIServer pid=12) Traceback (most recent call last):
(APIServer pid=12)   File "/venv/vllm/v1/utils.py", line 12, in wait
(APIServer pid=12) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
""".splitlines()


def test_a_too_long_context_is_named_with_its_flag() -> None:
    """The reason stands on the line after the error; the advice is the flag."""
    text = explain("engine-1", 1, TOO_LONG, LOG)
    assert text.startswith("engine-1 ended with status 1:\n")
    assert "\n    User-specified max_model_len (99999) is greater than the derived max_model_len (8192)" in text
    assert "--max-model-len" in text
    assert text.endswith(f"Its log: {LOG}")
    assert "Traceback" not in text


def test_the_cause_counts_not_the_wrapper() -> None:
    """vLLM's parent only says that its child failed; that line is left out, and so are the prefixes."""
    assert what_matters(IN_THE_CHILD) == ["ValueError: No available memory for the cache blocks."]
    assert "needs more memory" in explain("engine-1", 1, IN_THE_CHILD, LOG)


def test_without_an_error_the_last_lines_count() -> None:
    """A program that ends without a word of Python is quoted as it is."""
    assert what_matters(["one", "two", "", "three", "four"]) == ["two", "three", "four"]


def test_silence_is_said() -> None:
    """No output at all is an answer too."""
    assert explain("engine-1", 1, [], LOG).startswith("engine-1 ended with status 1 and said nothing.\n")


def test_a_kill_points_at_the_memory() -> None:
    """SIGKILL that nobody here sent is mostly the system's, out of memory."""
    text = explain("engine-1", 137, [], LOG)
    assert "engine-1 was killed" in text
    assert "out of memory" in text


def test_other_signals_are_named() -> None:
    """A crash in native code shows as its signal."""
    assert "engine-1 ended by signal 11" in explain("engine-1", 139, ["!!!!!!! Segfault encountered"], LOG)


def test_a_start_that_takes_too_long_is_no_crash() -> None:
    """It was stopped by us, and that is what it says."""
    text = explain("engine-1", 137, ["loading"], LOG, timed_out=True)
    assert text.startswith("engine-1 did not get ready in time")
    assert "out of memory" not in text


def test_lines_are_clipped_and_not_doubled() -> None:
    """An error that comes three times with half a page of text is one line of bounded length."""
    (line,) = what_matters(["RuntimeError: " + "x" * 1000] * 3)
    assert len(line) == 300
