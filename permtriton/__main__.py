"""``python -m permtriton``, which ``torchrun`` starts as ``torchrun -m permtriton``: the command line."""

from permtriton.cli.main import main

main()
