import pytest

from bench.live.tokens import Tokens, token_range

PAGE = 16


def ids(tokens: Tokens, pages, count):
    return [int(each) for each in tokens.prompt(pages, count).split(b",")]


def test_the_same_in_every_process():
    assert ids(Tokens("salt", 4), (7,), 4) == [28870, 9104, 26052, 4236]


def test_shared_pages_are_shared_tokens():
    one = ids(Tokens("a", PAGE), (1, 2, 3), 3 * PAGE)
    other = ids(Tokens("a", PAGE), (1, 2, 4), 3 * PAGE)
    assert one[: 2 * PAGE] == other[: 2 * PAGE]
    assert all(x != y for x, y in zip(one[2 * PAGE :], other[2 * PAGE :], strict=True))


def test_a_partly_filled_page_begins_as_the_full_one():
    tokens = Tokens("a", PAGE)
    assert ids(tokens, (1, 2), PAGE + 5) == ids(tokens, (1, 2), 2 * PAGE)[: PAGE + 5]


def test_the_salt_changes_every_page():
    assert ids(Tokens("a", PAGE), (1,), PAGE) != ids(Tokens("b", PAGE), (1,), PAGE)


@pytest.mark.parametrize("page", [0, 1, 2**63, 2**70, -5])
def test_any_page_id(page):
    assert len(ids(Tokens("a", PAGE), (page,), PAGE)) == PAGE


@pytest.mark.parametrize(
    ("vocabulary", "expected"),
    [(None, (1000, 30_000)), (150_000, (1000, 30_000)), (2200, (1000, 2200)), (300, (150, 300))],
)
def test_within_the_vocabulary(vocabulary, expected):
    assert token_range(vocabulary) == expected
    low, high = expected
    found = ids(Tokens("a", 4096, expected), (1,), 4096)
    assert low <= min(found)
    assert max(found) < high


@pytest.mark.parametrize("count", [0, PAGE, 2 * PAGE + 1])
def test_a_length_that_does_not_end_in_the_last_page(count):
    with pytest.raises(ValueError, match="last of 2 pages"):
        Tokens("a", PAGE).prompt((1, 2), count)
