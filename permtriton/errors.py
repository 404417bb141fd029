"""The errors a user can meet: what, got, expected, what to do. The CLI prints the message and exits with 2."""


class PermTritonError(Exception):
    """Base of every error that is the input's, the machine's or the option's fault, never a bug's."""


class ConfigError(PermTritonError):
    """An option, or a combination of options, that makes no sense."""


class ModelError(PermTritonError):
    """A model that cannot be loaded, traced or pruned as asked."""


class CalibrationError(PermTritonError):
    """Text or token ids that cannot be calibrated on, or activations that are not finite."""


class OutputError(PermTritonError):
    """An output folder that may not, or cannot, be written."""


class VerificationError(PermTritonError):
    """A check of the result failed; nothing was saved."""
