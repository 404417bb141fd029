import pytest

from permtriton.errors import ConfigError
from permtriton.util.sparsity import MAX_GROUP, NMPattern


@pytest.mark.parametrize(
    ("text", "kept", "group"), [("2:4", 2, 4), (" 4 : 8 ", 4, 8), ("1:2", 1, 2), ("31:32", 31, 32), ("02:04", 2, 4)]
)
def test_parse(text, kept, group):
    assert NMPattern.parse(text) == NMPattern(kept, group)


@pytest.mark.parametrize("text", ["", "2", "2:", ":4", "2:4:8", "2-4", "a:b", "2.0:4", "-2:4", "2/4", "2:4\nx"])
def test_text_that_is_no_pattern(text):
    with pytest.raises(ConfigError, match="2:4"):
        NMPattern.parse(text)


@pytest.mark.parametrize(("kept", "group"), [(0, 4), (4, 4), (5, 4), (-1, 4), (1, 1), (0, 0), (2, MAX_GROUP + 1)])
def test_patterns_that_are_not_possible(kept, group):
    with pytest.raises(ConfigError, match=f"{kept}:{group}"):
        NMPattern(kept, group)


@pytest.mark.parametrize(("kept", "group", "sparsity"), [(2, 4, 0.5), (4, 8, 0.5), (1, 4, 0.75), (3, 4, 0.25)])
def test_sparsity_is_the_part_that_becomes_zero(kept, group, sparsity):
    assert NMPattern(kept, group).sparsity == sparsity


@pytest.mark.parametrize("pattern", [NMPattern(2, 4), NMPattern(8, 16)])
def test_text_reads_back(pattern):
    assert NMPattern.parse(str(pattern)) == pattern


def test_is_a_value():
    assert len({NMPattern(2, 4), NMPattern(2, 4), NMPattern(4, 8)}) == 2
    with pytest.raises(AttributeError):
        NMPattern(2, 4).kept = 1
