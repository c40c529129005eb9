"""What several policies want at once."""

from sidecar.errors import ConfigError
from sidecar.wire import Want


def union(*wants: Want) -> Want:
    """What tells all of them enough. Raises ConfigError if no one schedule of hashes serves all.

    A prefix hash covers one length and blocks one schedule, so of those that want any, all must
    want the same.
    """
    prefix = {want.prefix_tokens for want in wants} - {0}
    blocks = {
        (want.block_tokens, want.max_blocks, want.block_growth)
        for want in wants
        if want.block_tokens and want.max_blocks
    }
    if len(prefix) > 1:
        lengths = " and ".join(str(length) for length in sorted(prefix))
        raise ConfigError(
            f"hash_tokens: policies side by side want prefix hashes of {lengths} tokens; the hook "
            "makes one, so give them the same"
        )
    if len(blocks) > 1:
        sizes = " and ".join(str(size) for size, _, _ in sorted(blocks))
        raise ConfigError(
            f"block_tokens: policies side by side want prefix blocks of {sizes} tokens; the hook "
            "makes one kind, so give them the same"
        )
    block_tokens, max_blocks, growth = blocks.pop() if blocks else (0, 0, 0)
    return Want(
        prefix_tokens=prefix.pop() if prefix else 0,
        prefix_with_key=any(want.prefix_with_key for want in wants),
        block_tokens=block_tokens,
        max_blocks=max_blocks,
        block_growth=growth,
        history=max((want.history for want in wants), default=0),
    )
