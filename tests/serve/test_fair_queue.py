"""The queue: batches of equal requests, one after another in turn, and no request that waits for ever."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence

from hypothesis import given
from hypothesis import strategies as st

from sdonnx.serve.fair_queue import FairQueue, SharedPlaces
from sdonnx.serve.serve_settings import ServeLimits


def sizes(_: Hashable) -> Sequence[int]:
    return [1, 2, 4]


def queue(max_wait_s: float = 0.0) -> FairQueue[str]:
    return FairQueue(sizes, max_wait_s)


def test_equal_requests_share_a_batch_of_an_allowed_size() -> None:
    waiting = queue()
    for name in "abc":
        waiting.add(name, "small", images=1, cost=1, now=0)
    assert waiting.take(0) == ["a", "b"]  # 3 is no size
    assert waiting.take(0) == ["c"]
    assert waiting.take(0) == []


def test_different_requests_do_not_share_a_batch() -> None:
    waiting = queue()
    waiting.add("a", "small", images=1, cost=1, now=0)
    waiting.add("b", "large", images=1, cost=1, now=0)
    assert [waiting.take(0), waiting.take(0)] == [["a"], ["b"]]


def test_requests_of_many_images_take_turns_with_others() -> None:
    waiting = queue()
    waiting.add("many", "key", images=10, cost=1, now=0)
    waiting.add("one", "key", images=1, cost=1, now=0)
    assert waiting.take(0) == ["many", "one", "many", "many"]


def test_preferred_lanes_come_first() -> None:
    waiting = queue()
    for index, key in enumerate("abab"):
        waiting.add(f"{key}{index}", (key, index), images=1, cost=1, now=index)
    served = [waiting.take(9, lambda key: isinstance(key, tuple) and key[0] == "b")[0] for _ in range(4)]
    assert served == ["b1", "b3", "a0", "a2"]
    assert waiting.take(9, lambda _: True) == []


def test_new_lanes_starve_no_other() -> None:
    """Requests that all have different keys arrive for ever, as requests with LoRA weights may."""
    waiting = queue()
    waiting.add("other", "other", images=40, cost=1, now=0)
    assert set(waiting.take(0)) == {"other"}
    served = []
    for index in range(80):
        waiting.add("new", index, images=1, cost=1, now=1 + index)
        served.append(waiting.take(99)[0])
    # New lanes that wait have a share too, so that the times between its batches grow.
    assert served.count("other") >= 5
    assert "other" in served[:4]


def test_preferred_lanes_starve_no_other() -> None:
    """Of four batches, one is of the lane whose turn it is."""
    waiting = queue()
    waiting.add("other", "other", images=40, cost=1, now=0)
    served = []
    for index in range(8):
        waiting.add("preferred", ("preferred", index), images=1, cost=1, now=1 + index)
        served.append(waiting.take(99, lambda key: key != "other")[0])
    assert served[:4] == ["preferred"] * 3 + ["other"]


def test_preferred_lanes_pay_with_later_turns() -> None:
    """Two lanes that always have work share the time equally, with runs of batches."""
    waiting = queue()
    for name in "ab":
        waiting.add(name, name, images=400, cost=1, now=0)
    served: list[str] = []
    for _ in range(80):
        served.append(waiting.take(9, lambda key: bool(served) and key == served[-1])[0])
    changes = sum(one != other for one, other in itertools.pairwise(served))
    assert abs(served.count("a") - served.count("b")) <= 4
    assert changes <= 20


def test_large_work_does_not_starve_small_work() -> None:
    """Small requests that arrive while large ones wait are served before the second large batch."""
    waiting = queue()
    waiting.add("large", "large", images=100, cost=1000, now=0)
    assert set(waiting.take(0)) == {"large"}
    for index in range(20):
        waiting.add(f"small {index}", "small", images=1, cost=1, now=index)
    served = [waiting.take(99)[0] for _ in range(6)]
    assert [name.split()[0] for name in served] == ["small"] * 5 + ["large"]


def test_small_work_does_not_starve_large_work() -> None:
    """A stream of small requests, each sent as soon as the one before is served, leaves half of the time."""
    waiting = queue()
    waiting.add("large", "large", images=1, cost=100, now=0)
    served = []
    for index in range(300):
        waiting.add(f"small {index}", "small", images=1, cost=1, now=index)
        served.append(waiting.take(index)[0])
    assert served.index("large") <= 101


def test_a_batch_waits_for_others_for_a_bounded_time() -> None:
    waiting = queue(max_wait_s=0.5)
    waiting.add("a", "key", images=1, cost=1, now=10)
    assert waiting.take(10.2) == []
    assert waiting.wait_s(10.2) is not None
    assert abs((waiting.wait_s(10.2) or 0) - 0.3) < 1e-9
    waiting.add("b", "key", images=1, cost=1, now=10.4)
    assert waiting.take(10.5) == ["a", "b"]  # the wait of the first one counts
    waiting.add("c", "key", images=4, cost=1, now=11)
    assert waiting.take(11) == ["c"] * 4  # full
    assert waiting.wait_s(11) is None


def test_a_removed_request_is_not_served() -> None:
    waiting = queue()
    waiting.add("a", "key", images=3, cost=1, now=0)
    waiting.add("b", "key", images=1, cost=1, now=0)
    waiting.remove("a")
    assert (len(waiting), waiting.work) == (1, 1)
    assert waiting.take(0) == ["b"]
    waiting.add("a", "key", images=1, cost=1, now=0)
    assert waiting.clear() == ["a"]
    assert waiting.take(0) == []


REQUESTS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, 9), st.integers(0, 30)), min_size=1, max_size=30
)  # key, images, place between batches


@given(REQUESTS)
def test_every_image_is_served_once_and_in_fair_time(requests: list[tuple[int, int, int]]) -> None:
    costs = [1, 5, 50, 200]
    waiting: FairQueue[int] = FairQueue(sizes, 0.0)
    pending = sorted(enumerate(requests), key=lambda each: each[1][2])
    served = dict.fromkeys(range(len(requests)), 0)
    received = dict.fromkeys(range(4), 0.0)  # work by key while all keys wait
    turn = 0
    while pending or len(waiting):
        while pending and pending[0][1][2] <= turn:
            number, (key, images, _) = pending.pop(0)
            waiting.add(number, key, images=images, cost=costs[key], now=turn)
        batch = waiting.take(turn)
        turn += 1
        assert len(batch) in (0, 1, 2, 4)
        keys = {requests[number][0] for number in batch}
        assert len(keys) <= 1
        for number in batch:
            served[number] += 1
            received[requests[number][0]] += costs[requests[number][0]]
    assert served == {number: images for number, (_, images, _) in enumerate(requests)}
    assert len(waiting) == 0


@given(st.integers(1, 3), st.integers(1, 200))
def test_lanes_share_the_work(cost_exponent: int, batches: int) -> None:
    """Two lanes that never empty differ by a batch of the larger one at most."""
    costs = {"a": 1.0, "b": 10.0**cost_exponent}
    waiting = queue()
    for key, cost in costs.items():
        waiting.add(key, key, images=4 * 2000 * 1000, cost=cost, now=0)
    received = dict.fromkeys(costs, 0.0)
    for _ in range(batches):
        batch = waiting.take(0)
        received[batch[0]] += len(batch) * costs[batch[0]]
    assert abs(received["a"] - received["b"]) <= 4 * max(costs.values())


@given(st.integers(2, 6), st.lists(st.sampled_from(["same", "own"]), min_size=12, max_size=12))
def test_a_flood_of_one_client_delays_others_by_a_batch(clients: int, keys: list[str]) -> None:
    """Each client gets an equal share, however many requests and batch keys the flood has."""
    waiting = queue()
    for index, key in enumerate(keys):
        waiting.add(f"flood {index}", "key" if key == "same" else index, images=40, cost=1, now=0, client="flood")
    waiting.take(0)
    for number in range(1, clients):
        waiting.add(f"other {number}", "key", images=8, cost=1, now=1, client=f"client {number}")
    served: list[str] = []
    while not all(served.count(f"other {number}") == 8 for number in range(1, clients)):
        served += waiting.take(9)
    assert len(served) <= 8 * clients + 8
    assert {f"other {number}" for number in range(1, clients)} <= set(served[: clients + 4])


def test_batches_of_a_flood_are_short_while_there_are_others() -> None:
    """Another client waits for an image of the flood, and not for a batch, nor with images of the flood in its own."""
    waiting: FairQueue[str] = FairQueue(sizes, 0.0, many=10)
    waiting.add("flood", "key", images=400, cost=1, now=0, client="flood")
    assert waiting.take(0) == ["flood"] * 4  # no other client is known
    for second in range(1, 20):  # the other one comes again while an image of the flood is made
        waiting.add(f"other {second}", "key", images=1, cost=1, now=second, client="other")
        assert waiting.take(second) == [f"other {second}"]
        assert waiting.take(second + 0.5) == ["flood"]
    assert waiting.take(60) == ["flood"] * 4


def test_new_clients_starve_no_other() -> None:
    """Clients that are all different arrive for ever, each with one request."""
    waiting: FairQueue[str] = FairQueue(sizes, 0.0, many=10)
    waiting.add("other", "key", images=40, cost=1, now=0, client="other")
    served = []
    for index in range(80):
        waiting.add("new", "key", images=1, cost=1, now=1 + index, client=f"new {index}")
        served += waiting.take(1 + index)
    assert served.count("other") >= 4


def test_clients_with_few_images_share_batches() -> None:
    waiting: FairQueue[str] = FairQueue(sizes, 0.0, many=10)
    for client in "abc":
        waiting.add(client, "key", images=10, cost=1, now=0, client=client)
    assert waiting.take(0) == ["a", "b", "c", "a"]
    waiting.add("d", "key", images=11, cost=1, now=0, client="d")
    assert "d" not in waiting.take(0)[1:]


def test_a_client_that_was_idle_saves_no_time() -> None:
    """Work of a client that was alone is not held against it, and absence gives no credit."""
    waiting = queue()
    waiting.add("long", "long", images=400, cost=1, now=0, client="busy")
    for _ in range(50):
        waiting.take(0)
    waiting.add("new", "new", images=400, cost=1, now=1, client="idle")
    served = [waiting.take(9)[0] for _ in range(40)]
    assert 18 <= served.count("new") <= 22


def test_clients_share_batches_and_places() -> None:
    waiting = queue()
    waiting.add("a", "key", images=6, cost=1, now=0, client="a")
    waiting.add("b", "key", images=2, cost=1, now=0, client="b")
    assert (waiting.waiting_of("a"), waiting.waiting_of("b"), waiting.waiting_of("c")) == (6, 2, 0)
    assert waiting.take(0) == ["a", "b", "a", "b"]
    assert waiting.waiting_of("b") == 0


def test_a_client_leaves_places_free() -> None:
    """The shares of the dynamic thresholds: half for one client, a third each for two, and some for any other."""
    places = SharedPlaces(60)
    for client, share in (("a", 30), ("b", 15), ("c", 7)):
        while places.take(client, 1):
            pass
        assert places.held(client) == share
    assert not places.is_full(1)
    places.give_back("a", 30)
    while places.take("c", 1):
        pass
    assert places.held("c") == (60 - 15) // 2


def test_small_requests_find_places_beside_large_ones_of_the_same_client() -> None:
    places = SharedPlaces(64)
    while places.take("a", 10):
        pass
    assert 20 <= places.held("a") <= 32
    assert places.take("a", 1)


def test_a_client_without_a_name_gets_all_places() -> None:
    places = SharedPlaces(10)
    assert all(places.take("", 1) for _ in range(10))
    assert not places.take("", 1)


def test_the_first_request_of_a_client_may_take_all_that_is_free() -> None:
    places = SharedPlaces(10)
    assert places.take("a", 10)
    assert places.is_full(1)
    assert not places.take("b", 1)
    places.give_back("a", 10)
    assert not places.take("b", 11)
    assert places.take("b", 4)
    assert not places.take("b", 4)
    assert places.take("c", 4)


def test_batch_sizes_are_powers_of_two_and_the_maximum() -> None:
    assert ServeLimits(max_batch_size=6).batch_sizes() == [1, 2, 4, 6]
    assert ServeLimits(max_batch_size=8).batch_sizes() == [1, 2, 4, 8]
    assert ServeLimits(max_batch_size=1).batch_sizes() == [1]
    limits = ServeLimits(max_batch_size=8, max_batch_pixels=2 * 1024 * 1024)
    assert limits.batch_sizes(1024 * 1024) == [1, 2]
    assert limits.batch_sizes(2048 * 2048) == [1]
