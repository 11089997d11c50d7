"""Shares of bounded resources: a client that takes much leaves some to others."""

from __future__ import annotations

from collections import Counter

__all__ = ["SharedPlaces", "is_fair"]


def is_fair(amount: int, held: int, total: int, capacity: int) -> bool:
    """Return whether a client may take places: it may hold no more than it leaves free.

    So one client gets half of the places and two get a third each, and a new client always finds some. A client without
    places may take any that are free. A request for many places counts twice, so that small requests of the same
    client, which may be a network of several users, still find some.

    Source: Choudhury and Hahne, "Dynamic Queue Length Thresholds for Shared-Memory Packet Switches", IEEE/ACM
    Transactions on Networking 6 (1998), with a factor of 1.

    Args:
        amount: places to take.
        held: places that the client holds.
        total: places that all clients hold.
        capacity: all places.
    """
    free = capacity - total - amount
    return free >= 0 and (not held or held + 2 * amount - 1 <= free)


class SharedPlaces:
    """Places that clients hold; not thread-safe. A client without a name may take all that are free.

    Args:
        capacity: number of all places.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._held: Counter[str] = Counter()

    def held(self, client: str) -> int:
        """Return the number of places that a client holds."""
        return self._held[client]

    def is_full(self, amount: int) -> bool:
        """Return whether there is no room for `amount` more places, for any client."""
        return self._held.total() + amount > self.capacity

    def take(self, client: str, amount: int) -> bool:
        """Take places for a client; return whether it may have them."""
        if not is_fair(amount, self._held[client] if client else 0, self._held.total(), self.capacity):
            return False
        self._held[client] += amount
        return True

    def give_back(self, client: str, amount: int) -> None:
        """Give back places of a client."""
        self._held[client] -= amount
        if not self._held[client]:
            del self._held[client]
