"""Which ranks hold which prefix: a radix tree over chained prefix-block hashes.

A block's hash covers all that precedes it, so one dictionary of the nodes' first blocks leads from
node to node, and bisection tells how far into the last one a prompt goes. Consecutive blocks that
were used together share a node; a node knows in which span each rank used it last (footprint.py
says whether it is still there).
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from sidecar.policies.kv.footprint import Footprint

NODE_WEIGHT = 80
"""A node takes about as much memory as this many blocks, of 8 bytes each."""

SEEN_FREE = 5
SEEN_WEIGHT = 12
"""Each rank beyond the first five that has used a node takes as much as this many."""
GOES_ON_SHARE = 0.9
FREED_AT_ONCE = 128


class Node:
    """Blocks `start` to `start + len(blocks) - 1` of the prompts that pass through here."""

    __slots__ = ("above", "begin", "blocks", "children", "end", "seen", "start", "tail")

    def __init__(self, above: "Node | None", start: int, begin: int) -> None:
        self.above = above or self
        """The node before it; of the root itself."""
        self.start = start
        """Number of blocks before it."""
        self.begin = self.end = self.tail = begin
        """Tokens before it; up to its last block; up to the end of the prompt that ended here."""
        self.blocks = array("Q")
        self.children = 0
        self.seen: dict[int, int] = {}
        """Rank -> span of its last use there."""


class PrefixIndex:
    """Prefixes of one SGLang instance. Bounded by `limit` blocks, a node counting as four.

    ends: tokens up to the end of each block, ascending. footprints: by rank id, shared with the
    owner, who adds ranks before they are used.
    """

    def __init__(self, ends: Sequence[int], footprints: dict[int, Footprint], limit: int) -> None:
        self.ends = ends
        self.footprints = footprints
        self.limit = limit
        self.weight = 0
        self._root = Node(None, 0, 0)
        self._first: dict[int, Node] = {}
        """By the first block."""
        self._size = 0
        # The least recently used first. A node is used with all above it, and they after it: so
        # the first has no children.
        self._recent: OrderedDict[Node, None] = OrderedDict()

    def __len__(self) -> int:
        return self._size

    def taken_apart(self) -> Iterator[None]:
        """Free it piece by piece, a tenth of a millisecond each; nobody may use it any more."""
        while self._recent:
            for _ in range(min(FREED_AT_ONCE, len(self._recent))):
                node, _ = self._recent.popitem(last=False)
                self._first.pop(node.blocks[0], None)
            yield

    def known(self, blocks: Sequence[int]) -> int:
        """How many leading blocks of a prompt are known, wherever they are."""
        return self._find(blocks)[1]

    def _find(self, blocks: Sequence[int]) -> tuple[Node, int]:
        """The deepest node that holds a block of the prompt, and how many of them are known."""
        first, node, known = self._first, self._root, 0
        size = min(len(blocks), len(self.ends))
        while known < size:
            below = first.get(blocks[known])
            if below is None or below.start != known:
                break
            node, own = below, below.blocks
            end = known + len(own)
            if end > size or blocks[end - 1] != own[-1]:
                return node, known + _alike(blocks, own, known, size)
            known = end
        return node, known

    def held(self, blocks: Sequence[int], tokens: int) -> dict[int, int]:
        """Rank id -> leading tokens of the prompt that it holds, the longest first; no zeros."""
        node, known = self._find(blocks)
        found: dict[int, int] = {}
        if not known:
            return found
        whole = known == node.start + len(node.blocks)
        length = min(tokens, node.tail) if whole else self.ends[known - 1]
        footprints = self.footprints
        while node is not self._root:
            for rank, seen in node.seen.items():
                if rank not in found and seen >= footprints[rank].oldest:
                    found[rank] = length
            node = node.above
            length = node.end
        return found

    def goes_on(self, blocks: Sequence[int]) -> bool:
        """Whether a prompt goes on where one earlier prompt ended, and no other does as yet.

        Chat templates put other tokens at the end of a prompt than stand there in the next one: the
        last block may differ, or a tenth.
        """
        node, known = self._find(blocks)
        if not known or node.children:
            return False
        ended = node.start + len(node.blocks)
        return known + 1 >= ended or self.ends[known - 1] >= GOES_ON_SHARE * node.end

    def use(self, blocks: Sequence[int], tokens: int, rank: int, span: int) -> set[int]:
        """A prompt of `tokens` tokens went to a rank in `span`: it holds all of it from now on.

        Returns the ranks of which something was forgotten for it.
        """
        blocks = blocks[: len(self.ends)]
        if not blocks:
            return set()
        node, known = self._find(blocks)
        if known < len(blocks) and blocks[known] in self._first:
            # Two prefixes of one hash, or one twice in a prompt: what follows stays unknown.
            blocks = blocks[:known]
            if not blocks:
                return set()
        inside = known - node.start
        if inside < len(node.blocks) and (known < len(blocks) or not self._holds(node, rank)):
            node = self._split(node, inside)
        if known < len(blocks):
            node = self._grow(node, blocks, known, rank, span)
        if node.start + len(node.blocks) == len(blocks):
            node.tail = tokens if not node.children else node.end
        self._touch(node, rank, span)
        forgotten: set[int] = set()
        while self.weight > self.limit and len(self._recent) > 1:
            oldest = next(iter(self._recent))
            forgotten.update(oldest.seen)
            self._remove(oldest)
        return forgotten

    def _holds(self, node: Node, rank: int) -> bool:
        return rank in node.seen and self.footprints[rank].holds(node.seen[rank])

    def _grow(self, node: Node, blocks: Sequence[int], known: int, rank: int, span: int) -> Node:
        """Add the blocks that nobody knows; in place where the prompt is a turn of one session."""
        alone = not node.children and node.seen.keys() == {rank} and self._holds(node, rank)
        alone = alone and node.seen[rank] <= span
        if alone:
            self.footprints[rank].drop(node.end - node.begin, node.seen[rank])
            node.seen[rank] = -1
        else:
            node.tail = node.end
            node.children += 1
            node = self._first[blocks[known]] = Node(node, known, node.end)
            self.weight += NODE_WEIGHT
        new = len(blocks) - known
        node.blocks.extend(array("Q", blocks[known:]))
        node.end = node.tail = self.ends[len(blocks) - 1]
        self._size += new
        self.weight += new
        return node

    def _split(self, node: Node, at: int) -> Node:
        """Cut a node in two before its block `at`; returns the upper part, which is new."""
        upper = Node(node.above, node.start, node.begin)
        upper.blocks, node.blocks = node.blocks[:at], node.blocks[at:]
        upper.end = upper.tail = node.begin = self.ends[node.start + at - 1]
        node.start += at
        node.above = upper
        upper.children = 1
        upper.seen = dict(node.seen)
        self._first[upper.blocks[0]] = upper
        self._first.setdefault(node.blocks[0], node)
        self.weight += NODE_WEIGHT + _seen_weight(upper)
        # Right after its child, among the others as old as it: whoever splits uses the upper part
        # next, and until then it must not be the first.
        self._recent[upper] = None
        return upper

    def _touch(self, node: Node, rank: int, span: int) -> None:
        footprint, recent = self.footprints[rank], self._recent
        while node is not self._root:
            seen = node.seen.get(rank, -1)
            if rank not in node.seen and len(node.seen) >= SEEN_FREE:
                self.weight += SEEN_WEIGHT
            node.seen[rank] = footprint.use(node.end - node.begin, seen, span)
            recent[node] = None
            recent.move_to_end(node)
            node = node.above

    def _remove(self, node: Node) -> None:
        del self._recent[node]
        if self._first.get(node.blocks[0]) is node:
            del self._first[node.blocks[0]]
        self._size -= len(node.blocks)
        for rank, seen in node.seen.items():
            self.footprints[rank].drop(node.end - node.begin, seen)
        node.above.children -= 1
        self.weight -= len(node.blocks) + NODE_WEIGHT + _seen_weight(node)


def _seen_weight(node: Node) -> int:
    return SEEN_WEIGHT * max(0, len(node.seen) - SEEN_FREE)


def _alike(blocks: Sequence[int], own: Sequence[int], start: int, size: int) -> int:
    """How many of a node's leading blocks, the first of which is alike, a prompt has at `start`."""
    low, high = 1, min(len(own), size - start) + 1
    while high - low > 1:
        middle = (low + high) // 2
        if blocks[start + middle - 1] == own[middle - 1]:
            low = middle
        else:
            high = middle
    return low
