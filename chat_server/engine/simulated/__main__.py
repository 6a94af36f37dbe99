"""``python -m chat_server.engine.simulated --port N``: see ``--help``."""

from chat_server.engine.simulated.command import simulate_engine

if __name__ == "__main__":
    simulate_engine()
