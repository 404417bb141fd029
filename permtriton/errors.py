"""The errors that a user can meet. Each message says what is wrong, what was expected and what to do.

The CLI prints the message on one line and exits with code 2.
"""


class PermTritonError(Exception):
    """Base class of every error that comes from the input, the options or the machine, not from a bug."""


class ConfigError(PermTritonError):
    """An option, or a combination of options, that makes no sense."""


class ModelError(PermTritonError):
    """A model or checkpoint that cannot be loaded, traced, pruned or exported."""


class CalibrationError(PermTritonError):
    """Text or token ids that cannot be used for calibration or evaluation, or activations that are not finite."""


class OutputError(PermTritonError):
    """An output that cannot be written, or that must not be replaced."""


class VerificationError(PermTritonError):
    """A failed check of the result; nothing was saved."""
