"""A queue that forms batches of equal requests and shares the time of the device fairly.

Source: start-time fair queuing (Goyal, Vin, Cheng: "Start-time Fair Queueing", SIGCOMM 1996), with a flow for each
batch key and the computing time of an image as the length of a packet. Virtual time also passes as in weighted fair
queuing (Demers, Keshav, Shenker: "Analysis and Simulation of a Fair Queueing Algorithm", SIGCOMM 1989).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

__all__ = ["FairQueue"]

_MAX_PREFERRED = 3  # batches in a row that may precede the lane whose turn it is

Item = TypeVar("Item", bound=Hashable)


@dataclass
class _Entry(Generic[Item]):
    """A request with images that wait.

    Attributes:
        item: the request.
        waiting: number of images that wait.
        cost: work of one image.
        arrived: time of arrival in seconds.
    """

    item: Item
    waiting: int
    cost: float
    arrived: float


@dataclass
class _Lane(Generic[Item]):
    """The requests with one batch key.

    Attributes:
        start: virtual time at which the next batch of the lane starts.
        entries: requests, the next one first.
    """

    start: float
    entries: deque[_Entry[Item]] = field(default_factory=deque)

    @property
    def waiting(self) -> int:
        return sum(entry.waiting for entry in self.entries)

    @property
    def oldest(self) -> float:
        return min(entry.arrived for entry in self.entries)


class FairQueue(Generic[Item]):
    """Requests by batch key; not thread-safe.

    Lanes (batch keys) share the work equally, so that requests of much work delay others by a batch at most. Within a
    lane, batches take one image of each request in turn.

    Args:
        sizes: returns the numbers of images that a batch with a key may have, in rising order, from 1.
        max_wait_s: seconds that a request may wait for others to fill its batch.
    """

    def __init__(self, sizes: Callable[[Hashable], Sequence[int]], max_wait_s: float) -> None:
        self._sizes, self._max_wait_s = sizes, max_wait_s
        self._lanes: dict[Hashable, _Lane[Item]] = {}
        self._ends: dict[Hashable, float] = {}  # of lanes that are empty, if later than the virtual time
        self._now = 0.0  # virtual time
        self._passed = 0.0  # virtual time of the batch that was taken last
        self._preferred = 0  # batches in a row that were not of the lane whose turn it was

    def __len__(self) -> int:
        """Return the number of images that wait."""
        return sum(lane.waiting for lane in self._lanes.values())

    @property
    def work(self) -> float:
        """Work of all images that wait."""
        return sum(entry.waiting * entry.cost for lane in self._lanes.values() for entry in lane.entries)

    @property
    def oldest_s(self) -> float | None:
        """Time at which the oldest request arrived; None if nothing waits."""
        return min((lane.oldest for lane in self._lanes.values()), default=None)

    def add(self, item: Item, key: Hashable, *, images: int, cost: float, now: float) -> None:
        """Add a request.

        Args:
            item: the request.
            key: its batch key.
            images: number of images.
            cost: work of one image, in any unit; the same for all requests with this key.
            now: time in seconds.
        """
        if key not in self._lanes:
            self._lanes[key] = _Lane(max(self._ends.pop(key, 0.0), self._now))
        self._lanes[key].entries.append(_Entry(item, images, cost, now))

    def remove(self, item: Item) -> None:
        """Remove the images of a request that still wait."""
        for key, lane in list(self._lanes.items()):
            lane.entries = deque(entry for entry in lane.entries if entry.item != item)
            self._drop_empty(key)

    def clear(self) -> list[Item]:
        """Remove all requests and return them."""
        items = [entry.item for lane in self._lanes.values() for entry in lane.entries]
        self._lanes.clear()
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
        count = max((size for size in self._sizes(key) if size <= lane.waiting), default=1)
        batch = []
        cost = lane.entries[0].cost
        for _ in range(count):
            entry = lane.entries.popleft()
            batch.append(entry.item)
            entry.waiting -= 1
            if entry.waiting:
                lane.entries.append(entry)
        # Once a batch is over, each lane has had its share of that work. With the starts of lanes only, a stream of
        # requests whose keys are all new, such as weights of LoRAs, would starve the others.
        self._now = max(self._now + self._passed, self._lanes[turn].start)
        self._passed = count * cost / len(self._lanes)
        lane.start += count * cost
        self._drop_empty(key)
        self._ends = {each: end for each, end in self._ends.items() if end > self._now}
        return batch

    def _first(self, keys: Sequence[Hashable]) -> Hashable:
        return min(keys, key=lambda each: (self._lanes[each].start, self._lanes[each].oldest))

    def _ripe_at(self, key: Hashable) -> float:
        lane = self._lanes[key]
        is_full = lane.waiting >= self._sizes(key)[-1]
        return float("-inf") if is_full else lane.oldest + self._max_wait_s

    def _drop_empty(self, key: Hashable) -> None:
        if not self._lanes[key].entries:
            self._ends[key] = self._lanes.pop(key).start
