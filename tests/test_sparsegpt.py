import pytest
import torch
from torch import Tensor

from permtriton.errors import CalibrationError
from permtriton.kernels.nm_mask import top_n_mask
from permtriton.methods.measure.statistics import Curvature
from permtriton.methods.prune import sparsegpt as update
from permtriton.util.sparsity import NMPattern

TWO_FOUR = NMPattern(2, 4)
PATTERNS = [TWO_FOUR, NMPattern(4, 8), NMPattern(1, 4), NMPattern(3, 4)]


def problem(channels: int, rows: int = 6, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A weight and correlated inputs ``[channels, tokens]``."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.eye(channels) + 0.3 * torch.randn(channels, channels, generator=generator) / channels**0.5
    inputs = mixing @ torch.randn(channels, 4 * channels, generator=generator)
    return torch.randn(rows, channels, generator=generator), inputs + 0.5 * inputs[:1]


def sparsegpt(weight: Tensor, hessian: Tensor, pattern: NMPattern, mask: Tensor | None) -> Tensor:
    return update.sparsegpt(weight, Curvature(hessian), pattern, mask)


def wanda_mask(weight: Tensor, inputs: Tensor, pattern: NMPattern) -> Tensor:
    return top_n_mask((weight.abs() * inputs.norm(dim=1)).T, pattern).T


def damped_by_hand(hessian: Tensor) -> Tensor:
    wide = hessian.double()
    return wide + 0.01 * wide.diagonal().mean() * torch.eye(wide.shape[0], dtype=torch.float64)


def one_column_at_a_time(weight: Tensor, hessian: Tensor, pattern: NMPattern, mask: Tensor | None) -> Tensor:
    """Optimal brain surgery in float64, with the remaining Hessian inverted anew for every column."""
    w, h = weight.double().clone(), damped_by_hand(hessian)
    w[:, hessian.diagonal() == 0] = 0
    channels = w.shape[1]
    inverses = [torch.linalg.inv(h[c:, c:]) for c in range(channels)]
    for c in range(channels):
        if c % pattern.group == 0:
            keep = []
            for o in range(w.shape[0]):
                group = range(c, c + pattern.group)
                score = {k: float(w[o, k] ** 2 / inverses[k][0, 0]) for k in group}
                chosen = sorted(group, key=lambda k: (-score[k], k))[: pattern.kept]
                keep.append([k in chosen for k in group])
            keep = torch.tensor(keep) if mask is None else mask[:, c : c + pattern.group]
        error = w[:, c] * ~keep[:, c % pattern.group] / inverses[c][0, 0]
        w[:, c:] -= torch.outer(error, inverses[c][0])
        w[:, c] *= keep[:, c % pattern.group]
    return w


def output_error(weight: Tensor, pruned: Tensor, inputs: Tensor) -> float:
    return float(((weight - pruned) @ inputs).norm())


@pytest.mark.parametrize(("channels", "at_once"), [(8, 128), (40, 128), (40, 8), (40, 19), (136, 128)])
@pytest.mark.parametrize("own_mask", [True, False])
def test_agrees_with_the_update_column_by_column(channels, at_once, own_mask, monkeypatch):
    """With one lazy block and with several, the last of which is smaller."""
    monkeypatch.setattr(update, "COLUMNS_AT_ONCE", at_once)
    weight, inputs = problem(channels, rows=3)
    hessian = inputs @ inputs.T
    mask = None if own_mask else wanda_mask(weight, inputs, TWO_FOUR)
    expected = one_column_at_a_time(weight, hessian, TWO_FOUR, mask)
    found = sparsegpt(weight, hessian, TWO_FOUR, mask)
    assert torch.equal(found != 0, expected != 0)
    torch.testing.assert_close(found.double(), expected, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("pattern", [*PATTERNS, NMPattern(3, 12)], ids=str)
def test_chooses_an_exact_pattern(pattern):
    """144 channels are more than one lazy block; 12 divides 144 but not the published 128."""
    weight, inputs = problem(144)
    pruned = sparsegpt(weight, inputs @ inputs.T, pattern, None)
    assert pruned.dtype == torch.float32
    assert (pruned != 0).unflatten(1, (-1, pattern.group)).sum(2).eq(pattern.kept).all()


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_keeps_to_the_given_mask_and_lowers_the_error(pattern):
    weight, inputs = problem(64)
    mask = wanda_mask(weight, inputs, pattern)
    pruned = sparsegpt(weight, inputs @ inputs.T, pattern, mask)
    assert torch.equal(pruned != 0, mask)
    assert output_error(weight, pruned, inputs) < 0.98 * output_error(weight, weight * mask, inputs)


@pytest.mark.parametrize("dead", [[3], [4, 5, 6, 7], [0, 15]])
@pytest.mark.parametrize("own_mask", [True, False])
def test_dead_channels(dead, own_mask):
    """Channels that were never active lose their weights and disturb no other."""
    weight, inputs = problem(16)
    inputs[dead] = 0
    hessian = inputs @ inputs.T
    mask = None if own_mask else wanda_mask(weight, inputs, TWO_FOUR)
    pruned = sparsegpt(weight, hessian, TWO_FOUR, mask)
    assert pruned.isfinite().all()
    assert pruned[:, dead].eq(0).all()
    assert (pruned != 0).unflatten(1, (-1, 4)).sum(2).le(2).all()
    expected = one_column_at_a_time(weight, hessian, TWO_FOUR, mask)
    torch.testing.assert_close(pruned.double(), expected, atol=1e-4, rtol=1e-3)


def test_fewer_tokens_than_channels():
    """A singular Hessian: the damping makes it solvable."""
    weight, inputs = problem(32)
    pruned = sparsegpt(weight, inputs[:, :5] @ inputs[:, :5].T, TWO_FOUR, None)
    assert pruned.isfinite().all()
    assert (pruned != 0).unflatten(1, (-1, 4)).sum(2).eq(2).all()


@pytest.mark.parametrize("channels", [4, 24, 64])
@pytest.mark.parametrize("dead", [[], [0, 3]])
def test_inverse_diagonal_is_that_of_the_dense_inverse(channels, dead):
    _, inputs = problem(channels)
    inputs[dead] = 0
    hessian = inputs @ inputs.T
    expected = torch.linalg.inv(damped_by_hand(hessian)).diagonal()
    found = Curvature(hessian).inverse_diagonal()
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize("scale", [2.0**-10, 1.0, 2.0**10])
def test_no_unit_of_the_inputs_makes_dead_channels_important(scale):
    """As behind ReLU, where many channels are never active and the others may be small."""
    weight, inputs = problem(16)
    inputs[[0, 5, 6]] = 0
    hessian = inputs @ inputs.T
    scores = weight.square() / Curvature(hessian).inverse_diagonal()
    scaled = weight.square() / Curvature(scale**2 * hessian).inverse_diagonal()
    torch.testing.assert_close(scaled, scale**2 * scores, rtol=1e-4, atol=0)


def test_singular_hessians_are_refused():
    with pytest.raises(CalibrationError, match="layer x"):
        Curvature(-torch.ones(8, 8), "layer x").factor  # noqa: B018
