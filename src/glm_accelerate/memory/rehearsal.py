"""A step without numbers: tensors of which only the bytes are there, freed when the last one lets go of them,
as PyTorch frees them, and a tape that runs backwards as autograd does. What was alive at the worst moment,
by kind, is the prediction.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

# Of an operator's way back: the slope that came is passed on, or that made for the first input.
Passed = Literal["through", "first"]


class SimulatedMemory:
    """The memory of a device: what is in it, by kind, and what was in it when there was most."""

    def __init__(self) -> None:
        self.now: dict[str, int] = {}
        self.phase = ""
        self.total = self.peak = 0
        self.most: Mapping[str, int] = {}
        self.most_phase = ""

    def add(self, kind: str, size: int) -> None:
        """Takes memory, or gives it back."""
        self.now[kind] = self.now.get(kind, 0) + size
        self.total += size
        if self.total > self.peak:
            self.peak, self.most, self.most_phase = self.total, dict(self.now), self.phase

    def briefly(self, size: int, kind: str = "workspace") -> None:
        """What is gone when an operator ends."""
        self.add(kind, size)
        self.add(kind, -size)


class Held:
    """A piece of memory. It is given back when nothing refers to it."""

    def __init__(self, room: SimulatedMemory, kind: str, size: int) -> None:
        self.room, self.kind, self.size = room, kind, size
        room.add(kind, size)

    def __del__(self) -> None:
        self.room.add(self.kind, -self.size)


class Edge:
    """Where the slope of a value is summed."""

    slope: Held | None = None

    def add(self, slope: Held) -> None:
        """The first stays, the others are added to it."""
        if self.slope is None:
            self.slope = slope


class Value(Held):
    """What an operator made. Without an edge no gradient is wanted of it. A view takes no memory of its own,
    and keeps what it looks into.
    """

    def __init__(self, room: SimulatedMemory, size: int, edge: Edge | None, of: Held | None = None) -> None:
        super().__init__(room, "activations", 0 if of is not None else size)
        self.bytes, self.edge, self.of = size, edge, of


@dataclass(slots=True)
class Gradient:
    """Of a weight: its bytes, those of the product that it is cast from, and what was made of it before."""

    weight: object
    size: int
    part: int = 0
    made: Held | None = None


@dataclass(slots=True)
class Node:
    """The way back of an operator."""

    outs: list[Edge]
    inputs: list[Edge | None]
    kept: list[Held]
    slopes: Sequence[int | Passed]
    back: int
    gradients: Sequence[Gradient]


@dataclass(slots=True)
class Tape:
    """Records operators, and plays them backwards."""

    room: SimulatedMemory
    learns: Callable[[Gradient, Held], None]  # takes the gradient of a weight
    nodes: list[Node | Callable[[], None]] = field(default_factory=list["Node | Callable[[], None]"])
    on: bool = True

    def op(
        self,
        outs: Sequence[int],
        inputs: Sequence[Value],
        *,
        keeps: Sequence[Held] = (),
        keeps_outs: Sequence[int] = (),
        own: Sequence[tuple[str, int]] = (),
        during: int = 0,
        during_as: str = "workspace",
        of: Held | None = None,
        slopes: Sequence[int | Passed] = (),
        back: int = 0,
        gradients: Sequence[Gradient] = (),
    ) -> list[Value]:
        """An operator: bytes of what it makes; what it keeps for the way back, of others and of its `own`;
        what it has besides `during` the way there and `back`; bytes of the slopes that it makes for inputs.
        What it makes are views `of` another piece, if that is given.
        """
        learns = self.on and (bool(gradients) or any(each.edge for each in inputs))
        held = [Held(self.room, kind, size) for kind, size in own]
        made = [Value(self.room, size, Edge() if learns else None, of) for size in outs]
        self.room.briefly(during, during_as)
        if learns:
            edges = [out.edge for out in made if out.edge]
            kept = [*held, *keeps, *(made[index] for index in keeps_outs)]
            self.nodes.append(Node(edges, [each.edge for each in inputs], kept, slopes, back, gradients))
        return made

    def mark(self, run: Callable[[], None]) -> None:
        """Something to be done when the way back comes by here."""
        if self.on:
            self.nodes.append(run)

    def again(self, run: Callable[[], Value], learns: bool, kept: int = 0) -> Value:
        """What `run` makes. It runs once more on the way back, until when `kept` bytes are all that stays."""
        on, self.on = self.on, False
        made = run()
        self.on = on
        if on and learns:
            edge = made.edge = Edge()
            stays = [Held(self.room, "activations", kept)]

            def replay() -> None:
                stays.clear()
                again = run().edge
                assert again is not None
                again.slope, edge.slope = edge.slope, None

            self.nodes.append(replay)
        return made

    def backward(self) -> None:
        """From the last operator to the first; what each has kept goes when it is done."""
        while self.nodes:
            node = self.nodes.pop()
            if not isinstance(node, Node):
                node()
                continue
            came = [edge.slope for edge in node.outs if edge.slope is not None]
            for edge in node.outs:
                edge.slope = None
            if came:
                self._back(node, came)

    def _back(self, node: Node, came: list[Held]) -> None:
        made: list[Held | None] = []
        for edge, slope in zip(node.inputs, node.slopes, strict=True):
            if slope == "through":
                made.append(came[0])
            elif slope == "first":
                made.append(made[0])
            else:
                made.append(Held(self.room, "workspace", slope) if edge is not None else None)
        found = [each.made or Held(self.room, "gradients", each.size) for each in node.gradients]
        self.room.briefly(node.back + max((each.part for each in node.gradients), default=0))
        node.kept.clear()
        came.clear()
        for gradient, held in zip(node.gradients, found, strict=True):
            gradient.made = None
            self.learns(gradient, held)
        found.clear()
        for edge, slope in zip(node.inputs, made, strict=True):
            if edge is not None and slope is not None:
                edge.add(slope)
