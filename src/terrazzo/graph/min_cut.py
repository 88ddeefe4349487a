"""The cheapest of all ways to divide things in two, where some pairs cost when they are parted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Network:
    """A flow network; nodes are numbered, 0 is the source and 1 the sink."""

    heads: list[list[int]] = field(default_factory=lambda: [[], []])  # edges that leave a node
    target: list[int] = field(default_factory=list)
    room: list[float] = field(default_factory=list)

    def node(self) -> int:
        self.heads.append([])
        return len(self.heads) - 1

    def edge(self, a: int, b: int, capacity: float) -> None:
        """From a to b; the edge with the next number leads back."""
        for start, end, room in ((a, b, capacity), (b, a, 0.0)):
            self.heads[start].append(len(self.target))
            self.target.append(end)
            self.room.append(room)

    def sink_side(self) -> set[int]:
        """The smallest set on the sink's side of a minimum cut (Dinic's algorithm)."""
        while (depths := self._depths()) and depths[1] >= 0:
            tried = [0] * len(self.heads)
            while self._push(depths, tried):
                pass
        reached, stack = {1}, [1]
        while stack:
            for edge in self.heads[stack.pop()]:
                if self.room[edge ^ 1] > 0 and self.target[edge] not in reached:
                    reached.add(self.target[edge])
                    stack.append(self.target[edge])
        return reached

    def _depths(self) -> list[int]:
        depths = [-1] * len(self.heads)
        depths[0] = 0
        front = [0]
        for at in front:
            for edge in self.heads[at]:
                if self.room[edge] > 0 and depths[self.target[edge]] < 0:
                    depths[self.target[edge]] = depths[at] + 1
                    front.append(self.target[edge])
        return depths

    def _push(self, depths: Sequence[int], tried: list[int]) -> bool:
        """Send what one more shortest path has room for."""
        path: list[int] = []
        at = 0
        while at != 1:
            for edge in self.heads[at][tried[at]:]:
                if self.room[edge] > 0 and depths[self.target[edge]] == depths[at] + 1:
                    break
                tried[at] += 1
            else:
                if not path:
                    return False
                at = self.target[path.pop() ^ 1]
                tried[at] += 1
                continue
            path.append(edge)
            at = self.target[edge]
        amount = min(self.room[edge] for edge in path)
        for edge in path:
            self.room[edge] -= amount
            self.room[edge ^ 1] += amount
        return True
