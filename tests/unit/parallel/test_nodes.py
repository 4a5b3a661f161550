"""What the launcher at the meeting point decides, from what nodes report and from the time."""

from collections.abc import Callable

import pytest

from glm_accelerate.parallel import nodes
from glm_accelerate.parallel.nodes import (
    Begin,
    End,
    Ended,
    Hub,
    Join,
    Member,
    Order,
    Over,
    Stop,
    Terms,
    fitting,
    from_message,
    to_message,
)

FACTS = {"torch": "2.13.0", "optim.learning_rate": "0.001"}
WRONG = {"Join": {"name": "A", "ranks": "two", "facts": {}}}
DONE, FINAL, STOPPED = 0, 2, 75


class Node:
    """One that remembers what it was told."""

    def __init__(self, hub: Hub, name: str, ranks: int = 1, facts: dict[str, str] = FACTS) -> None:
        self.hub, self.told = hub, list[Order]()
        self.member = Member(name, ranks, self.told.append)
        hub.join(self.member, facts)

    def ends(self, code: int | None, cause: str = "", *, second: bool = False) -> None:
        self.hub.ended(self.member, Ended(code, cause, second))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """clock(seconds): let time pass."""
    now = [1000.0]
    monkeypatch.setattr(nodes.time, "monotonic", lambda: now[0])

    def advance(seconds: float) -> None:
        now[0] += seconds

    return advance


@pytest.fixture
def saved() -> list[int]:
    """The newest saved step, last."""
    return [0]


@pytest.fixture
def hub_of(clock: Callable[[float], None], saved: list[int]) -> Callable[..., Hub]:
    return lambda least, most, multiple=1: Hub(
        "job",
        Terms(least, most, multiple),
        lambda: saved[-1],
        FINAL,
        FACTS,
        lambda: 4000,
        _idle=1000.0,
    )


def test_all_start_together_and_end_together(hub_of: Callable[..., Hub]) -> None:
    hub = hub_of(2, 2)
    a = Node(hub, "A", 3)
    hub.tick()
    assert not a.told
    b = Node(hub, "B", 2)
    hub.tick()
    said = "starting with 5 ranks on 2 nodes"
    assert (a.told, b.told) == ([Begin(0, 5, 2, 4000, "job", said)], [Begin(3, 5, 2, 4000, "job", said)])
    a.ends(DONE)
    hub.tick()
    assert not hub.over
    b.ends(DONE)
    hub.tick()
    assert a.told[-1] == b.told[-1] == Over(DONE)


def test_more_nodes_are_waited_for_only_so_long(
    hub_of: Callable[..., Hub], clock: Callable[[float], None]
) -> None:
    hub = hub_of(1, 3)
    a, b = Node(hub, "A"), Node(hub, "B")
    hub.tick()
    clock(nodes.LAST_CALL - 1)
    hub.tick()
    assert not a.told
    clock(2)
    hub.tick()
    assert a.told == [Begin(0, 2, 2, 4000, "job", "starting with 2 ranks on 2 nodes")]
    assert b.member.running


def test_a_node_too_few_is_waited_for_and_then_the_job_is_given_up(
    hub_of: Callable[..., Hub], clock: Callable[[float], None]
) -> None:
    hub = hub_of(2, 3)
    a = Node(hub, "A")
    clock(nodes.MEETING - 1)
    hub.tick()
    assert not a.told
    clock(2)
    hub.tick()
    assert isinstance(over := a.told[-1], Over)
    assert (over.code, "1 node with 1 rank came in 30 minutes, of at least 2" in over.why) == (1, True)


def test_a_failure_ends_all_and_names_its_cause(
    hub_of: Callable[..., Hub], clock: Callable[[float], None], saved: list[int]
) -> None:
    hub = hub_of(1, 2)
    a, b = Node(hub, "A"), Node(hub, "B")
    hub.tick()
    a.ends(None, "rank 0 ended by exit code 3", second=True)
    assert b.told[-1] == End("", second=True)  # its ranks are left alone to report
    saved.append(5)
    b.ends(None, "rank 1 ended by SIGKILL")
    hub.tick()
    why = "node B: rank 1 ended by SIGKILL"
    assert a.told[-1] == Begin(
        0, 2, 2, 4000, "job", f"starting again from step 5 with 2 ranks on 2 nodes ({why})"
    )


def test_attempts_without_progress_are_counted_over_all_nodes(
    hub_of: Callable[..., Hub], clock: Callable[[float], None], saved: list[int]
) -> None:
    """Progress begins the count again; a node that is lost counts as a rank that dies."""
    hub = hub_of(1, 2)
    a = Node(hub, "A")
    for number in range(6):
        b = Node(hub, "B")
        hub.tick()
        assert b.member.running
        if number == 2:
            saved.append(7)
        if number % 2 == 0:
            b.ends(None, "rank 1 ended by exit code 1")
        hub.leave(b.member)
        assert a.told[-1] == End(
            "node B is lost" if number % 2 else "node B: rank 1 ended by exit code 1", bool(number % 2)
        )
        a.ends(None, "rank 0 ended by exit code 3", second=True)
        hub.tick()
        assert hub.over == (number == 5)
    why = "given up: 3 attempts in a row ended without getting further than step 7"
    assert a.told[-1] == Over(1, f"{why} (node B is lost)")


def test_a_mistake_ends_all_with_its_code(hub_of: Callable[..., Hub]) -> None:
    hub = hub_of(2, 2)
    a, b = Node(hub, "A"), Node(hub, "B")
    hub.tick()
    b.ends(FINAL, "what is wrong is said there")
    a.ends(None, "rank 0 ended by exit code 3", second=True)
    hub.tick()
    assert a.told[-1] == b.told[-1] == Over(FINAL, "node B: what is wrong is said there")


def test_whoever_is_asked_to_stop_stops_all(hub_of: Callable[..., Hub]) -> None:
    hub = hub_of(1, 2)
    a, b, spare = Node(hub, "A"), Node(hub, "B"), Node(hub, "C")
    hub.tick()
    hub.stop(spare.member)
    assert spare.told == [Over(STOPPED)]
    assert not isinstance(a.told[-1], Stop)
    hub.stop(b.member)
    assert a.told[-1] == b.told[-1] == Stop()
    a.ends(STOPPED)
    b.ends(STOPPED)
    hub.tick()
    assert a.told[-1] == b.told[-1] == Over(STOPPED)


def test_nodes_that_do_not_fit_are_left_over_at_once(
    hub_of: Callable[..., Hub], clock: Callable[[float], None]
) -> None:
    """Nobody else can come: there is nothing to wait for. One of them takes the place of one that is lost."""
    hub = hub_of(1, 3, 2)
    a, b, c = (Node(hub, name) for name in "ABC")
    hub.tick()
    said = "starting with 2 ranks on 2 nodes, 1 node left over"
    assert [one.told for one in (a, b, c)] == [
        [Begin(0, 2, 2, 4000, "job", said)],
        [Begin(1, 2, 2, 4000, "job", said)],
        [],
    ]
    hub.leave(b.member)
    a.ends(None, "rank 0 ended by exit code 3", second=True)
    hub.tick()
    clock(nodes.RETURN + 1)
    hub.tick()
    assert isinstance(c.told[-1], Begin)


def test_a_node_that_comes_is_taken_in_at_the_next_checkpoint(
    hub_of: Callable[..., Hub], clock: Callable[[float], None], saved: list[int]
) -> None:
    """Where use can be made of it: of three ranks only two share products in pairs."""
    hub = hub_of(1, 4, 2)
    a, b = Node(hub, "A"), Node(hub, "B")
    hub.tick()
    clock(nodes.LAST_CALL + 1)
    hub.tick()
    assert a.member.running
    assert b.member.running
    saved.append(10)
    c = Node(hub, "C")
    for step in (10, 20):
        saved.append(step)
        clock(nodes.LOOK)
        hub.tick()
    assert not c.told
    assert not isinstance(a.told[-1], Stop)
    d = Node(hub, "D")
    clock(nodes.LOOK)
    hub.tick()
    assert not isinstance(a.told[-1], Stop)
    saved.append(30)
    clock(nodes.LOOK)
    hub.tick()
    assert a.told[-1] == b.told[-1] == Stop()
    a.ends(STOPPED)
    b.ends(STOPPED)
    hub.tick()
    said = "starting again from step 30 with 4 ranks on 4 nodes"
    assert [one.told[-1] for one in (a, b, c, d)] == [Begin(n, 4, 4, 4000, "job", said) for n in range(4)]


def test_nodes_that_differ_are_refused_by_name(hub_of: Callable[..., Hub]) -> None:
    """Before the job begins all end; later only the one that came."""
    hub = hub_of(2, 2)
    a = Node(hub, "A")
    b = Node(hub, "B", facts={**FACTS, "torch": "2.12.0"})
    refusal = Over(FINAL, "node B differs from A: torch 2.12.0, not 2.13.0")
    assert a.told == b.told == [refusal]
    hub = hub_of(1, 2)
    a = Node(hub, "A")
    Node(hub, "B")
    hub.tick()
    late = Node(hub, "A", facts={**FACTS, "optim.learning_rate": "0.1"})
    assert late.told == [Over(FINAL, "node A#2 differs from A: optim.learning_rate 0.1, not 0.001")]
    assert not hub.over
    assert late.member not in hub.members


@pytest.mark.parametrize(
    ("ranks", "least", "most", "multiple", "taken"),
    [
        ([8, 8, 8], 1, 3, 1, 3),
        ([8, 8, 8], 1, 4, 16, 2),  # one waits
        ([8, 4, 8], 1, 4, 16, 2),  # the small one waits
        ([1, 1, 1], 1, 2, 1, 2),  # a spare
        ([1, 1, 1], 3, 4, 2, 0),  # another one has to come
        ([1, 1, 1], 1, 3, 4, 3),  # none can: the plan says so
    ],
)
def test_as_many_as_fit_take_part(ranks: list[int], least: int, most: int, multiple: int, taken: int) -> None:
    members = [Member(str(number), count, print) for number, count in enumerate(ranks)]
    chosen = fitting(members, Terms(least, most, multiple))
    assert len(chosen) == taken
    assert not chosen or chosen[0] is members[0]


def test_what_is_no_message_is_none() -> None:
    said = Join("A", 2, {"torch": "2.13.0"})
    assert from_message(to_message(said)) == said
    for odd in ({}, {"Join": {}}, {"Join": {"name": "A"}, "Stop": {}}, {"Hub": {}}, {"Over": [1]}, WRONG):
        assert from_message(odd) is None
