"""Which of a step's samples each rank takes, from their lengths alone: about equally many tokens each."""

from collections.abc import Sequence


def deal(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Places in the step, in order, for each rank. The longest goes first, to the rank with the least."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        rank = min(range(ranks), key=lambda rank: loads[rank])
        shares[rank].append(place)
        loads[rank] += lengths[place]
    return [sorted(share) for share in shares]
