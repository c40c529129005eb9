"""One rank's radix prefix cache, as SGLang's RadixCache keeps it, over page ids.

A node holds a run of pages; two prompts share nodes as far as their pages are equal. The least
recently used leaf that nobody uses is evicted first, and whole, as SGLang does.
"""

import heapq
from collections.abc import Hashable, Sequence

Page = Hashable


class Node:
    """A run of pages that follows its parent's."""

    __slots__ = ("children", "locks", "pages", "parent", "used")

    def __init__(self, pages: Sequence[Page], parent: "Node | None") -> None:
        self.pages = pages
        self.parent = parent
        self.children: dict[Page, Node] = {}
        self.locks = 0
        self.used = 0


class RadixCache:
    """Prefix cache of `capacity` pages; what is locked is never evicted."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.clear()

    def clear(self) -> None:
        """Forget everything; nothing may be locked."""
        self.root = Node((), None)
        self.root.locks = 1
        self.pages = 0
        self.pinned = 0
        self.claimed: object = None
        """The rank whose oldest request waits for memory, if ranks share it: it is served first."""
        self.reserved = 0
        """Tokens promised to requests and not held here as pages."""
        self._tick = 0
        self._seq = 0
        self._named = 0
        # Lazily kept heap of leaves: an entry whose `used` is not the node's any more is void.
        self._leaves: list[tuple[int, int, Node]] = []

    def match(self, pages: Sequence[Page]) -> tuple[Node, int]:
        """The node at the end of the longest cached prefix, and that prefix in pages.

        Touches the path; splits a node that is shared in part, as SGLang does.
        """
        self._tick += 1
        return self._walk(pages)

    def peek(self, pages: Sequence[Page]) -> int:
        """The longest cached prefix in pages; changes nothing."""
        node, at, size = self.root, 0, len(pages)
        while at < size:
            child = node.children.get(pages[at])
            if child is None:
                break
            common = _common(child.pages, pages, at)
            at += common
            if common < len(child.pages):
                break
            node = child
        return at

    def insert(self, pages: Sequence[Page], after: Node | None = None) -> Node:
        """Cache `pages` after those that end with the locked node `after` (None: from the root on);
        returns the last node. May exceed the capacity: evict before."""
        self._tick += 1
        above = after
        while above is not None:
            above.used = self._tick
            above = above.parent
        node, at = self._walk(pages, after)
        if at < len(pages):
            leaf = Node(pages[at:], node)
            node.children[pages[at]] = leaf
            self.pages += len(leaf.pages)
            leaf.used = self._tick
            self._offer(leaf)
            node = leaf
        return node

    def lock(self, node: Node) -> None:
        """Pin the path to `node`."""
        while node.parent is not None:
            if node.locks == 0:
                self.pinned += len(node.pages)
            node.locks += 1
            node = node.parent

    def unlock(self, node: Node) -> None:
        """Undo one `lock`."""
        while node.parent is not None:
            node.locks -= 1
            if node.locks == 0:
                self.pinned -= len(node.pages)
                if not node.children:
                    self._offer(node)
            node = node.parent

    def evict(self, pages: int) -> int:
        """Evict leaves until `pages` are free of them or none is left; returns how many were."""
        freed = 0
        leaves = self._leaves
        while freed < pages and leaves:
            used, _, node = heapq.heappop(leaves)
            parent = node.parent
            if parent is None or node.locks or node.children or node.used != used:
                continue
            freed += len(node.pages)
            del parent.children[node.pages[0]]
            node.parent = None
            if not parent.children and not parent.locks:
                self._offer(parent)
        self.pages -= freed
        return freed

    def new_pages(self, count: int) -> tuple[Page, ...]:
        """Pages that no prompt holds."""
        self._named += count
        return tuple(("answer", name) for name in range(self._named - count, self._named))

    @property
    def evictable(self) -> int:
        """Pages that `evict` could free."""
        return self.pages - self.pinned

    def _walk(self, pages: Sequence[Page], after: Node | None = None) -> tuple[Node, int]:
        node, at, size = after or self.root, 0, len(pages)
        while at < size:
            child = node.children.get(pages[at])
            if child is None:
                break
            common = _common(child.pages, pages, at)
            if common < len(child.pages):
                child = self._split(child, common)
            at += common
            child.used = self._tick
            node = child
        if not node.children and not node.locks:
            self._offer(node)
        return node, at

    def _split(self, node: Node, at: int) -> Node:
        """Cut a node in two; returns the upper part. Both count as used now, as in SGLang."""
        upper = Node(node.pages[:at], node.parent)
        upper.locks, upper.used = node.locks, node.used
        upper.children[node.pages[at]] = node
        assert node.parent is not None
        node.parent.children[node.pages[0]] = upper
        node.pages = node.pages[at:]
        node.parent = upper
        node.used = self._tick
        if not node.children and not node.locks:
            self._offer(node)
        return upper

    def _offer(self, node: Node) -> None:
        if node.parent is None:
            return
        self._seq += 1
        heapq.heappush(self._leaves, (node.used, self._seq, node))


def _common(run: Sequence[Page], pages: Sequence[Page], at: int) -> int:
    """How many pages of `run` equal those of `pages` from `at` on."""
    size = min(len(run), len(pages) - at)
    if run[:size] == pages[at : at + size]:
        return size
    low, high = 0, size  # run[:low] is equal, run[:high] is not
    while high - low > 1:
        middle = (low + high) // 2
        if run[low:middle] == pages[at + low : at + middle]:
            low = middle
        else:
            high = middle
    return low
