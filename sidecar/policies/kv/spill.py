"""When a request leaves the rank that holds its prefix."""


def leaves(here: float, best: float, stake: float, move_tokens: float, move_ratio: float) -> bool:
    """Whether to leave a rank that costs `here` for one that costs `best`, all in tokens.

    Costs contain what must be computed anew elsewhere, so leaving for any gain would be right if
    they were exact. They are not, a move copies the prefix, and the next turn would move it again:
    so the gain must exceed a margin, at most the `stake` (tokens held here and not there: where a
    replica holds as much, there is nothing to lose), and for a large stake the ratio too.
    """
    if here <= best + min(move_tokens, stake):
        return False
    return stake <= move_tokens or here > move_ratio * best
