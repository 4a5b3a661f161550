"""A step without numbers: tensors of which only the bytes are there, freed when the last one lets go of them,
as PyTorch frees them, and a tape that runs backwards as autograd does. What was alive at the worst moment,
by kind, is the prediction.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field


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
    """Where the gradient of a value is summed: the first stays, the others are added to it."""

    gradient: Held | None = None


class Value(Held):
    """What an operator returned. Without an edge no gradient is wanted of it. A view takes no memory of its
    own, and keeps what it looks into.
    """

    def __init__(self, room: SimulatedMemory, size: int, edge: Edge | None, of: Held | None = None) -> None:
        super().__init__(room, "activations", 0 if of is not None else size)
        self.bytes, self.edge, self.of = size, edge, of


@dataclass(slots=True)
class WeightGradient:
    """Its bytes, those of the product that it is cast from, and what the forward pass has computed of it."""

    weight: object
    size: int
    part: int = 0
    held: Held | None = None


@dataclass(slots=True)
class Node:
    """The backward pass of an operator."""

    outs: list[Edge]
    inputs: list[tuple[Edge | None, int]]  # and the bytes of their gradients
    kept: list[Held]
    through: Sequence[int]
    shared: bool
    back: int
    weights: Sequence[WeightGradient]


@dataclass(slots=True)
class Tape:
    """Records operators, and plays them backwards."""

    room: SimulatedMemory
    take: Callable[[WeightGradient, Held], None]  # the gradient of a weight
    nodes: list[Node | Callable[[], None]] = field(default_factory=list["Node | Callable[[], None]"])
    on: bool = True

    def op(
        self,
        outs: Sequence[int],
        inputs: Sequence[Value],
        *,
        keeps: Sequence[Held] = (),
        keeps_first: bool = False,
        during: int = 0,
        during_as: str = "workspace",
        of: Held | None = None,
        through: Sequence[int] = (),
        shared: bool = False,
        back: int = 0,
        weights: Sequence[WeightGradient] = (),
    ) -> list[Value]:
        """An operator: bytes of its results, views `of` another piece if that is given; what it keeps for
        backward, its first result too where `keeps_first`; bytes besides, `during` forward and `back`.

        The gradient of an input has the input's bytes, but the one that came is handed `through` to inputs of
        these numbers, and where it is `shared` the first input's is that of all.
        """
        learns = self.on and (bool(weights) or any(each.edge for each in inputs))
        results = [Value(self.room, size, Edge() if learns else None, of) for size in outs]
        self.room.briefly(during, during_as)
        if learns:
            edges = [out.edge for out in results if out.edge]
            kept = [*keeps, *(results[:1] if keeps_first else [])]
            ends = [(each.edge, each.bytes) for each in inputs]
            self.nodes.append(Node(edges, ends, kept, through, shared, back, weights))
        return results

    def mark(self, run: Callable[[], None]) -> None:
        """Something to be done when the backward pass comes by here."""
        if self.on:
            self.nodes.append(run)

    def again(self, run: Callable[[], Value], learns: bool) -> Value:
        """What `run` returns. It runs once more in the backward pass, and keeps nothing until then."""
        on, self.on = self.on, False
        result = run()
        self.on = on
        if on and learns:
            edge = result.edge = Edge()

            def replay() -> None:
                again = run().edge
                assert again is not None
                again.gradient, edge.gradient = edge.gradient, None

            self.nodes.append(replay)
        return result

    def backward(self) -> None:
        """From the last operator to the first; what each has kept goes when it is done."""
        while self.nodes:
            node = self.nodes.pop()
            if not isinstance(node, Node):
                node()
                continue
            came = [edge.gradient for edge in node.outs if edge.gradient is not None]
            for edge in node.outs:
                edge.gradient = None
            if came:
                self._back(node, came)

    def _back(self, node: Node, came: list[Held]) -> None:
        passed: list[Held | None] = []
        for number, (edge, size) in enumerate(node.inputs):
            if number in node.through:
                passed.append(came[0])
            elif node.shared and number:
                passed.append(passed[0])
            else:
                passed.append(None if edge is None else Held(self.room, "workspace", size))
        weights = [each.held or Held(self.room, "gradients", each.size) for each in node.weights]
        self.room.briefly(node.back + max((each.part for each in node.weights), default=0))
        node.kept.clear()
        came.clear()
        for gradient, held in zip(node.weights, weights, strict=True):
            gradient.held = None
            self.take(gradient, held)
        weights.clear()
        for (edge, _), held in zip(node.inputs, passed, strict=True):
            if edge is not None and edge.gradient is None:
                edge.gradient = held
