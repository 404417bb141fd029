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
