"""The command line, for ``python -m permtriton`` and ``torchrun -m permtriton``."""

from permtriton.cli.main import main

main()
