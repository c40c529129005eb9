"""What the index should know, kept the slow way: a dictionary of every prefix for every rank."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from sidecar.hashing import block_ends
from sidecar.policies.kv.footprint import Footprint
from sidecar.policies.kv.index import NODE_WEIGHT, SEEN_FREE, SEEN_WEIGHT, PrefixIndex

ENDS = block_ends(4, 12, 3)
"""4, 8, 12, 16, ... and then growing blocks."""

Path = tuple[int, ...]


def blocks_of(prompt: Sequence[int], namespace: int = 0) -> list[int]:
    """Chained hashes of a prompt whose letters are blocks."""
    # Of small integers hash() is the same in every process; the wire has unsigned 64 bits.
    return [hash((namespace, *prompt[: end + 1])) & (1 << 64) - 1 for end in range(len(prompt))]


def size(path: Path) -> int:
    """Tokens of the last block of a prefix."""
    return ENDS[len(path) - 1] - (ENDS[len(path) - 2] if len(path) > 1 else 0)


@dataclass
class Rank:
    """Prefix -> span of its last use, of what one rank holds."""

    capacity: int = 0
    oldest: int = 0
    spans: dict[Path, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(map(size, self.spans))

    def use(self, prompt: Path, span: int) -> None:
        for end in range(1, len(prompt) + 1):
            path = prompt[:end]
            if path in self.spans or span >= self.oldest:
                self.spans[path] = max(span, self.spans.get(path, span))
        while self.capacity and self.total > self.capacity and len({*self.spans.values()}) > 1:
            first = min(self.spans.values())
            self.spans = {path: span for path, span in self.spans.items() if span > first}
            self.oldest = first + 1


@dataclass
class Naive:
    """All ranks, and how long the prompts were that ended with a block nobody went beyond."""

    ranks: dict[int, Rank]
    known: set[Path] = field(default_factory=set)
    tails: dict[Path, int] = field(default_factory=dict)

    def use(self, prompt: Path, tokens: int, rank: int, span: int) -> None:
        if not prompt:
            return
        prefixes = {prompt[:end] for end in range(1, len(prompt) + 1)}
        for path in prefixes - {prompt}:
            self.tails.pop(path, None)
        self.known |= prefixes
        if not self.beyond(prompt):
            self.tails[prompt] = tokens
        self.ranks[rank].use(prompt, span)

    def held(self, prompt: Path, tokens: int) -> dict[int, int]:
        """The slow way: each rank, each prefix, the longest first."""
        found = {}
        deepest = max(n for n in range(len(prompt) + 1) if not n or prompt[:n] in self.known)
        for rank, state in self.ranks.items():
            for end in range(len(prompt), 0, -1):
                path = prompt[:end]
                if path in state.spans:
                    tail = self.tails.get(path, 0) if end == deepest else 0
                    found[rank] = max(ENDS[end - 1], min(tail, tokens))
                    break
        return found

    def beyond(self, path: Path) -> bool:
        """Whether a known prefix goes on beyond this one."""
        return any(len(p) > len(path) and p[: len(path)] == path for p in self.known)


class Pair:
    """The index and its reference, told the same."""

    def __init__(self, ranks: int, capacity: int = 0, limit: int = 1 << 20) -> None:
        self.footprints = {rank: Footprint(capacity, 0, 0) for rank in range(ranks)}
        self.index = PrefixIndex(ENDS, self.footprints, limit)
        self.naive = Naive({rank: Rank(capacity) for rank in range(ranks)})

    def use(self, prompt: Path, tail: int, rank: int, span: int) -> None:
        tokens = tokens_of(prompt, tail)
        self.index.use(blocks_of(prompt), tokens, rank, span)
        self.naive.use(prompt, tokens, rank, span)

    def clear(self, rank: int, span: int) -> None:
        self.footprints[rank].clear(span)
        self.naive.ranks[rank].spans = {}
        self.naive.ranks[rank].oldest = span

    def held(self, prompt: Path, tail: int) -> tuple[dict[int, int], dict[int, int]]:
        tokens = tokens_of(prompt, tail)
        return self.index.held(blocks_of(prompt), tokens), self.naive.held(prompt, tokens)


def tokens_of(prompt: Path, tail: int) -> int:
    """Length of a prompt that ends `tail` tokens, less than a block, after its last block."""
    return (ENDS[len(prompt) - 1] if prompt else 0) + tail


def check(index: PrefixIndex) -> None:
    """That all parts of an index agree with each other."""
    nodes = list(index._recent)
    assert {id(node) for node in nodes} == {id(node) for node in index._first.values()}
    assert sum(len(node.blocks) for node in nodes) == len(index)
    seen = sum(max(0, len(node.seen) - SEEN_FREE) for node in nodes)
    assert index.weight == len(index) + NODE_WEIGHT * len(nodes) + SEEN_WEIGHT * seen
    children = Counter(id(node.above) for node in nodes)
    for node in nodes:
        assert node.blocks
        assert index._first[node.blocks[0]] is node
        assert node.begin == node.above.end
        assert node.start == node.above.start + len(node.above.blocks)
        assert node.end == index.ends[node.start + len(node.blocks) - 1] <= node.tail
        assert node.children == children[id(node)]
    for rank, footprint in index.footprints.items():
        held = [
            (node.end - node.begin, node.seen[rank])
            for node in nodes
            if footprint.holds(node.seen.get(rank, -1))
        ]
        assert footprint.total == sum(tokens for tokens, _ in held)
        since = footprint.since
        assert footprint.active == sum(tokens for tokens, seen in held if seen >= since)
    # Whatever is removed first has nothing below it.
    order = {id(node): place for place, node in enumerate(nodes)}
    for node in nodes:
        assert order.get(id(node.above), len(nodes)) > order[id(node)]
