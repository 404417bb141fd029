"""Packed N:M weights: exact, one packed form per weight, and anything else is refused."""

import pytest
import torch

from permtriton.errors import ConfigError, ModelError
from permtriton.kernels import packing
from permtriton.kernels.packing import pack, pack_positions, packed_shapes, position_bits, unpack, unpack_positions
from permtriton.util.sparsity import NMPattern

from .kernel_inputs import DTYPES, PATTERNS, TWO_FOUR, rng, sparse


@pytest.mark.parametrize(
    ("pattern", "dtype"),
    [*((pattern, torch.bfloat16) for pattern in PATTERNS), *((TWO_FOUR, dtype) for dtype in DTYPES[1:])],
)
@pytest.mark.parametrize(("rows", "groups"), [(5, 1), (13, 9), (0, 3)])
def test_unpack_undoes_pack_bit_for_bit(pattern, dtype, rows, groups):
    weight = sparse(rows, groups, pattern, dtype)
    values, positions = pack(weight, pattern)
    assert (values.dtype, positions.dtype) == (dtype, torch.uint8)
    assert (tuple(values.shape), tuple(positions.shape)) == packed_shapes(*weight.shape, pattern)
    again = unpack(values, positions, weight.shape[1], pattern)
    assert torch.equal(again, weight)
    assert not again.signbit().logical_and(again == 0).any()


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_the_bits_are_where_the_format_says(pattern):
    """Written out by hand, one number with little-endian bits for each row."""
    weight = sparse(4, 3, pattern)
    values, positions = pack(weight, pattern)
    for row, row_values, row_positions in zip(weight.tolist(), values.tolist(), positions, strict=True):
        number, shift, expected = 0, 0, []
        for start in range(0, len(row), pattern.group):
            part = row[start : start + pattern.group]
            nonzero = [i for i, value in enumerate(part) if value]
            free = [i for i, value in enumerate(part) if not value]
            for slot in sorted(nonzero + free[: pattern.kept - len(nonzero)]):
                number |= slot << shift
                shift += position_bits(pattern.group)
                expected.append(part[slot])
        assert row_values == expected
        assert int.from_bytes(bytes(row_positions.tolist()), "little") == number
        assert row_positions.numel() == -(-shift // 8)


def test_a_known_weight():
    weight = torch.tensor([[0.0, 1.0, 0.0, 2.0, 0.0, 0.0, 3.0, 0.0], [0.0] * 8])
    values, positions = pack(weight, TWO_FOUR)
    assert values.tolist() == [[1.0, 2.0, 0.0, 3.0], [0.0] * 4]
    assert positions.tolist() == [[0b10_00_11_01], [0b01_00_01_00]]


@pytest.mark.parametrize("group", [2, 3, 4, 8, 12, 16, 31, 32])
@pytest.mark.parametrize("count", [0, 1, 21])
def test_positions_of_every_width(group, count):
    slots = torch.randint(0, group, (3, count), generator=rng(group))
    packed = pack_positions(slots, group)
    assert packed.shape == (3, -(-count * position_bits(group) // 8))
    assert torch.equal(unpack_positions(packed, count, group), slots.byte())


def test_2_4_in_16_bits_takes_nine_sixteenths():
    weight = sparse(64, 64, TWO_FOUR, torch.bfloat16)
    assert sum(part.nbytes for part in pack(weight, TWO_FOUR)) == 0.5625 * weight.nbytes


@pytest.mark.parametrize("chunk", [1, 40, 10**6])
def test_the_size_of_a_chunk_changes_nothing(chunk, monkeypatch):
    weight = sparse(13, 5, TWO_FOUR)
    expected = pack(weight, TWO_FOUR)
    monkeypatch.setattr(packing, "CHUNK", chunk)
    found = pack(weight, TWO_FOUR)
    assert all(map(torch.equal, expected, found))
    assert torch.equal(unpack(*found, 20, TWO_FOUR), weight)
    weight[12, 16:19] = 1
    with pytest.raises(ModelError, match=r"row 12: more nonzero weights in a group than 2:4"):
        pack(weight, TWO_FOUR)


@pytest.mark.parametrize("view", [lambda w: w.t().contiguous().t(), lambda w: w.repeat(1, 2)[:, : w.shape[1]]])
def test_strided_weights(view):
    weight = sparse(6, 4, TWO_FOUR)
    assert all(map(torch.equal, pack(view(weight), TWO_FOUR), pack(weight, TWO_FOUR)))


@pytest.mark.parametrize(
    ("value", "named"), [(-0.0, "-0.0"), (float("nan"), "not finite"), (float("-inf"), "not finite")]
)
def test_what_cannot_be_packed_is_named(value, named):
    weight = sparse(6, 4, TWO_FOUR)
    weight[4, 9] = value
    with pytest.raises(ModelError, match=f"row 4: .*{named}"):
        pack(weight, TWO_FOUR)


@pytest.mark.parametrize(
    ("weight", "pattern", "error", "named"),
    [
        (torch.zeros(4, 10), (2, 4), ModelError, "10 input channels.*multiple of 4"),
        (torch.zeros(8), (2, 4), ModelError, r"\[8\].*\[out, in\]"),
        (torch.zeros(4, 8, dtype=torch.int32), (2, 4), ModelError, "int32"),
        (torch.zeros(4, 8), (4, 4), ConfigError, "4:4"),
        (torch.zeros(4, 66), (2, 33), ConfigError, "2:33"),
    ],
)
def test_what_has_no_packed_form_is_refused(weight, pattern, error, named):
    with pytest.raises(error, match=named):
        pack(weight, NMPattern(*pattern))


@pytest.mark.parametrize("which", ["values", "positions", "dtype", "float positions", "vector"])
def test_wrong_shapes_and_dtypes_are_refused(which):
    values, positions = pack(sparse(4, 4, TWO_FOUR), TWO_FOUR)
    values, positions = {
        "values": (values[:, :-1], positions),
        "positions": (values, positions[:, :-1]),
        "dtype": (values.int(), positions),
        "float positions": (values, positions.float()),
        "vector": (values.flatten(), positions),
    }[which]
    with pytest.raises(ModelError, match="packed values of"):
        packing.check_packed_shapes(values, positions, 16, TWO_FOUR)
