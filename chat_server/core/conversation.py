"""A conversation as the owner of its answer holds it: the prompt, and all that the store could lose."""

from __future__ import annotations

from collections.abc import Iterable

from chat_server.core.items import Item


class Conversation:
    """All items in their order."""

    def __init__(self, items: Iterable[Item]) -> None:
        self._items = list(items)

    @property
    def items(self) -> tuple[Item, ...]:
        return tuple(self._items)

    def before(self, item_id: str) -> tuple[Item, ...]:
        """The items before this one: the prompt of the answer that it is."""
        return tuple(self._items[: self._find(item_id, len(self._items))])

    def put(self, item: Item, previous: str | None) -> None:
        """An item entered behind ``previous`` (None: at the start), or is another one now."""
        at = self._find(item.id, -1)
        if at >= 0:
            self._items[at] = item
        else:
            self._items.insert(0 if previous is None else self._find(previous, len(self._items)) + 1, item)

    def remove(self, item_id: str) -> None:
        """An item left."""
        self._items = [item for item in self._items if item.id != item_id]

    def _find(self, item_id: str, default: int) -> int:
        return next((at for at, item in enumerate(self._items) if item.id == item_id), default)
