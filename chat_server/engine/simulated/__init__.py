"""An engine without a model: it speaks vLLM's HTTP API, at a settable speed, and fails on demand.

For tests, load tests and front-end work, where a real engine would be too slow. What it writes is a known function of
the prompt (``answer_for``); one contract test holds it against a real vLLM engine.

text      what it says, and its tokens      cache    its prefix cache
engine    admission, pace, counters         server   the HTTP API, and the faults on the wire
options   speeds and faults                 command  the command line
"""

from chat_server.engine.simulated.engine import EngineDied, SimulatedEngine
from chat_server.engine.simulated.options import Fault, SimulatedOptions
from chat_server.engine.simulated.server import SimulatedServer, serve_simulated, simulated_server
from chat_server.engine.simulated.text import answer_for, prompt_tokens, tokens

__all__ = [
    "EngineDied",
    "Fault",
    "SimulatedEngine",
    "SimulatedOptions",
    "SimulatedServer",
    "answer_for",
    "prompt_tokens",
    "serve_simulated",
    "simulated_server",
    "tokens",
]
