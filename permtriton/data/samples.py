"""What a model is called with: token ids, images, sound, or several tensors together."""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from permtriton.data.special_tokens import NONE, SpecialTokens
from permtriton.errors import CalibrationError


@dataclass(frozen=True, eq=False)
class Samples:
    """Calibration or evaluation samples; each sample is one row of every tensor.

    Attributes:
        inputs: argument of the model's ``forward`` -> tensor; all have the same first dimension. Token ids are
            ``{"input_ids": int64 [samples, tokens]}``.
        tokens: positions of the last hidden state per sample. Token ids determine it; for other inputs, it is 0 until
            the model was run to find it (`permtriton.model.forward.with_tokens`).
        longest: positions per sample of the encoder's states or of the last hidden state, whichever has more; known
            when ``tokens`` is known.
        surplus: further samples of the same text, different from these; None if there are none.
        special: the special tokens around each sequence; None if a user made the token ids.
    """

    inputs: Mapping[str, Tensor]
    tokens: int = 0
    longest: int = 0
    surplus: "Samples | None" = None
    special: SpecialTokens | None = None

    def __post_init__(self) -> None:
        shapes = {name: tuple(tensor.shape) for name, tensor in self.inputs.items()}
        counts = {shape[:1] for shape in shapes.values()}
        if len(counts) != 1 or () in counts or not all(tensor.numel() for tensor in self.inputs.values()):
            raise CalibrationError(
                f"the inputs have the shapes {shapes}: expected tensors with one row per sample each"
            )
        if self.is_text:
            decoded = [shape[1] for name, shape in shapes.items() if name.startswith("decoder_") or name == "labels"]
            object.__setattr__(self, "longest", max(shape[1] for shape in shapes.values()))
            object.__setattr__(self, "tokens", max(decoded) if decoded else self.longest)
        elif not self.longest:
            object.__setattr__(self, "longest", self.tokens)

    @classmethod
    def of(cls, inputs: "Inputs") -> "Samples":
        """Returns samples of token ids (int64 ``[samples, tokens]``), or of a mapping like ``inputs``."""
        if isinstance(inputs, Samples):
            return inputs
        return cls({"input_ids": inputs} if isinstance(inputs, Tensor) else dict(inputs))

    @property
    def is_text(self) -> bool:
        """Whether every tensor holds integers ``[samples, tokens]``, so that samples may be cut short."""
        return all(tensor.ndim == 2 and not tensor.is_floating_point() for tensor in self.inputs.values())

    @property
    def ids(self) -> Tensor | None:
        """The token ids, int64 ``[samples, tokens]``; None if ``inputs`` hold anything else."""
        return self.inputs["input_ids"] if list(self.inputs) == ["input_ids"] else None

    @property
    def counted(self) -> slice:
        """The positions of the last hidden state that are measured: all but special tokens around text or labels."""
        special = self.special or NONE
        inner = special if special.labels is None else special.labels
        return slice(len(inner.before), -len(inner.after) or None)

    @property
    def positions(self) -> int:
        """Positions of the last hidden state in all samples."""
        return len(self) * self.tokens

    def __len__(self) -> int:
        return next(iter(self.inputs.values())).shape[0]

    def __getitem__(self, rows: Tensor | slice) -> "Samples":
        """Returns the samples with the numbers ``rows``, int64 ``[...]`` on any device, or of a slice."""
        inputs = {
            name: tensor[rows.to(tensor.device, non_blocking=True) if isinstance(rows, Tensor) else rows]
            for name, tensor in self.inputs.items()
        }
        return replace(self, inputs=inputs, surplus=None)

    def split(self, size: int) -> Iterator["Samples"]:
        for start in range(0, len(self), size):
            yield self[start : start + size]

    def joined(self, *others: "Samples") -> "Samples":
        """Returns these samples and then others with the same arguments."""
        inputs = {name: torch.cat([part.inputs[name] for part in (self, *others)]) for name in self.inputs}
        return replace(self, inputs=inputs, surplus=None)

    def start(self, samples: int, tokens: int) -> "Samples":
        """Returns the first ``samples``; each sample of text is cut to at most ``tokens`` tokens, as by `start_of`."""
        first = self[:samples]
        if not self.is_text:
            return first
        return Samples({name: start_of(tensor, tokens) for name, tensor in first.inputs.items()})

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> "Samples":
        """Returns the samples on a device; floating-point tensors in ``dtype`` unless it is None."""
        inputs = {name: t.to(device, dtype if t.is_floating_point() else None) for name, t in self.inputs.items()}
        return replace(self, inputs=inputs)

    @property
    def sha256(self) -> str:
        """SHA-256 of all tensors, which shows whether two compilations used the same samples."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.inputs.items()):
            tensor = tensor.detach().cpu()
            if name == "input_ids":
                digest.update(str(tuple(tensor.shape)).encode() + tensor.to(torch.int64).numpy().tobytes())
            else:
                digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
                digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
        return digest.hexdigest()


def start_of(rows: Tensor, tokens: int) -> Tensor:
    """Returns rows ``[rows, tokens]`` cut to at most ``tokens`` tokens: the first tokens of a row, then its last two.

    The last two may be an end token, whose hidden state is all that some heads read, and a language token.
    """
    if rows.shape[1] <= tokens:
        return rows
    last = min(tokens, 2)
    return torch.cat([rows[:, : tokens - last], rows[:, -last:]], 1)


Inputs = Tensor | Mapping[str, Tensor] | Samples  # what `Samples.of` takes
