"""``python -m chat_server`` is ``chat-server``."""

from chat_server.cli import main

if __name__ == "__main__":
    main()
