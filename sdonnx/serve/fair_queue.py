"""A queue that forms batches of equal requests and shares the time of the device fairly.

Source: start-time fair queuing (Goyal, Vin, Cheng: "Start-time Fair Queueing", SIGCOMM 1996), with a flow for each
client, and below it one for each batch key, and the computing time of an image as the length of a packet. Virtual time
also passes as in weighted fair queuing (Demers, Keshav, Shenker: "Analysis and Simulation of a Fair Queueing
Algorithm", SIGCOMM 1989).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ["FairQueue", "SharedPlaces", "is_fair"]


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


_MAX_PREFERRED = 3  # batches in a row that may precede the lane whose turn it is
_RECENT_S = 30.0  # in which a client was served, so that it may come again

Item = TypeVar("Item", bound=Hashable)


@dataclass
class _Entry(Generic[Item]):
    """A request with images that wait.

    Attributes:
        item: the request.
        client: name of the client that sent it.
        waiting: number of images that wait.
        cost: work of one image.
        arrived: time of arrival in seconds.
    """

    item: Item
    client: str
    waiting: int
    cost: float
    arrived: float


class _Turns:
    """Virtual times of flows that share the work equally.

    Args:
        counts_joined: whether flows that join during a batch share its time. They would be ahead of those that wait
            otherwise, if they come again after each batch; flows that come once would keep others waiting for longer.
    """

    def __init__(self, *, counts_joined: bool) -> None:
        self._counts_joined = counts_joined
        self._starts: dict[Hashable, float] = {}  # virtual time at which the next batch of a flow starts
        self._ends: dict[Hashable, float] = {}  # of flows with no work, if later than the virtual time
        self._now = 0.0  # virtual time
        self._work = 0.0  # of the batch that was taken last
        self._present: set[Hashable] = set()  # flows when it was taken

    def start(self, flow: Hashable) -> float:
        """Return the virtual time at which the next batch of a flow starts; the smallest comes first."""
        return self._starts[flow]

    def join(self, flow: Hashable) -> None:
        """Add a flow, unless it is there."""
        if flow not in self._starts:
            self._starts[flow] = max(self._ends.pop(flow, 0.0), self._now)

    def leave(self, flow: Hashable) -> None:
        """Remove a flow that has no work left."""
        self._ends[flow] = self._starts.pop(flow)

    def pass_time(self, turn: Hashable) -> None:
        """Let time pass before a batch, when it is the turn of a flow.

        Once a batch is over, each flow has had its share of that work. With the starts of flows only, a stream of
        requests of flows that are all new, such as weights of LoRAs, would starve the others.
        """
        shared = self._present | self._starts.keys() if self._counts_joined else self._present
        self._now = max(self._now + self._work / max(1, len(shared)), self._starts[turn])
        self._work, self._present = 0.0, set(self._starts)
        self._ends = {each: end for each, end in self._ends.items() if end > self._now}

    def charge(self, flow: Hashable, work: float) -> None:
        """Add work of the batch that is taken."""
        self._starts[flow] += work
        self._work += work


class FairQueue(Generic[Item]):
    """Requests by batch key; not thread-safe.

    Clients share the work equally, and so do the lanes (batch keys) of a client, so that requests of much work delay
    others by a batch at most. Within a lane, batches take one image of each client, and of each of its requests, in
    turn. A client with many images that wait makes others wait for no long batches: while there are others, its batches
    have one image, and it does not fill batches of others.

    Args:
        sizes: returns the numbers of images that a batch with a key may have, in rising order, from 1.
        max_wait_s: seconds that a request may wait for others to fill its batch.
        many: number of images of a client that wait, above which its batches are short; None for no limit.
    """

    def __init__(self, sizes: Callable[[Hashable], Sequence[int]], max_wait_s: float, many: int | None = None) -> None:
        self._sizes, self._max_wait_s, self._many = sizes, max_wait_s, many
        self._served_s: dict[str, float] = {}  # by client, for those that were served recently
        self._lanes: dict[Hashable, deque[_Entry[Item]]] = {}  # by batch key; the next request of a client first
        self._lane_turns, self._client_turns = _Turns(counts_joined=False), _Turns(counts_joined=True)
        self._preferred = 0  # batches in a row that came from a lane out of turn

    def __len__(self) -> int:
        """Return the number of images that wait."""
        return sum(entry.waiting for entry in self._entries())

    @property
    def work(self) -> float:
        """Work of all images that wait."""
        return sum(entry.waiting * entry.cost for entry in self._entries())

    @property
    def oldest_s(self) -> float | None:
        """Time at which the oldest request arrived; None if nothing waits."""
        return min((entry.arrived for entry in self._entries()), default=None)

    def waiting_of(self, client: str) -> int:
        """Return the number of images of a client that wait."""
        return sum(entry.waiting for entry in self._entries() if entry.client == client)

    def add(self, item: Item, key: Hashable, *, images: int, cost: float, now: float, client: str = "") -> None:
        """Add a request.

        Args:
            item: the request.
            key: its batch key.
            images: number of images.
            cost: work of one image, in any unit; the same for all requests with this key.
            now: time in seconds.
            client: name of the client that sent it.
        """
        self._lane_turns.join(key)
        self._client_turns.join(client)
        self._lanes.setdefault(key, deque()).append(_Entry(item, client, images, cost, now))

    def remove(self, item: Item) -> None:
        """Remove the images of a request that still wait."""
        for key, lane in list(self._lanes.items()):
            for entry in [each for each in lane if each.item == item]:
                lane.remove(entry)
                self._drop_empty(key, entry.client)

    def clear(self) -> list[Item]:
        """Remove all requests and return them."""
        items = [entry.item for entry in self._entries()]
        for item in items:
            self.remove(item)
        return items

    def wait_s(self, now: float) -> float | None:
        """Return the seconds until a batch can be taken, 0 if one can be; None if nothing waits."""
        return max(0.0, min(self._ripe_at(key) for key in self._lanes) - now) if self._lanes else None

    def take(self, now: float, prefer: Callable[[Hashable], bool] | None = None) -> list[Item]:
        """Return the requests of the next batch, once for each image; empty if there is none yet.

        Args:
            now: time in seconds.
            prefer: returns whether a batch with a key costs less now. Such lanes may come first, but at most three
                batches in a row, and they pay for it with later turns.
        """
        ripe = [key for key in self._lanes if self._ripe_at(key) <= now]
        if not ripe:
            return []
        turn = key = self._first(ripe)
        preferred = [each for each in ripe if prefer is not None and prefer(each)]
        if preferred and turn not in preferred and self._preferred < _MAX_PREFERRED:
            key = self._first(preferred)
        self._preferred = 0 if key == turn else self._preferred + 1
        lane = self._lanes[key]
        first, crowding = self._next_entry(key).client, self._crowding(now)
        fitting = sum(entry.waiting for entry in lane if entry.client not in crowding)
        most = 1 if first in crowding else fitting
        count = max((size for size in self._sizes(key) if size <= most), default=1)
        batch = []
        cost = lane[0].cost
        self._lane_turns.pass_time(turn)
        self._client_turns.pass_time(self._next_entry(turn).client)
        for _ in range(count):
            entry = self._next_entry(key, crowding - {first})
            self._served_s[entry.client] = now
            lane.remove(entry)
            batch.append(entry.item)
            entry.waiting -= 1
            self._lane_turns.charge(key, cost)
            self._client_turns.charge(entry.client, cost)
            if entry.waiting:
                lane.append(entry)
            else:
                self._drop_empty(key, entry.client)
        return batch

    def _entries(self) -> Iterator[_Entry[Item]]:
        return (entry for lane in self._lanes.values() for entry in lane)

    def _crowding(self, now: float) -> set[str]:
        """Return the clients with many images that wait, if there are others or were recently."""
        self._served_s = {client: last for client, last in self._served_s.items() if last > now - _RECENT_S}
        waiting = Counter[str]()
        for entry in self._entries():
            waiting[entry.client] += entry.waiting
        if self._many is None or len(waiting.keys() | self._served_s.keys()) < 2:
            return set()
        return {client for client, images in waiting.items() if images > self._many}

    def _next_entry(self, key: Hashable, without: Collection[str] = ()) -> _Entry[Item]:
        """Return the first request of the client that has its turn in a lane."""
        entries = (entry for entry in self._lanes[key] if entry.client not in without)
        return min(entries, key=lambda entry: self._turn(entry.client))

    def _turn(self, client: str) -> tuple[float, float]:
        """Return the order of a client: the one that has had the least comes first, then the one served longest ago."""
        return self._client_turns.start(client), self._served_s.get(client, 0.0)

    def _first(self, keys: Sequence[Hashable]) -> Hashable:
        def order(key: Hashable) -> tuple[tuple[float, float], float, float]:
            client = self._next_entry(key).client
            return self._turn(client), self._lane_turns.start(key), self._oldest(key)

        return min(keys, key=order)

    def _ripe_at(self, key: Hashable) -> float:
        lane = self._lanes[key]
        is_full = sum(entry.waiting for entry in lane) >= self._sizes(key)[-1]
        return float("-inf") if is_full else self._oldest(key) + self._max_wait_s

    def _oldest(self, key: Hashable) -> float:
        return min(entry.arrived for entry in self._lanes[key])

    def _drop_empty(self, key: Hashable, client: str) -> None:
        """Remove a lane without requests, and a client without any."""
        if not self._lanes[key]:
            self._lane_turns.leave(key)
            del self._lanes[key]
        if all(entry.client != client for entry in self._entries()):
            self._client_turns.leave(client)
