"""The command line: each command parses, makes a config, calls the library once, and prints."""

import typer

from permtriton.cli.autotune import autotune
from permtriton.cli.compare import compare
from permtriton.cli.compile import compile
from permtriton.cli.doctor import doctor
from permtriton.cli.export import export
from permtriton.cli.inspect import inspect

app = typer.Typer(
    help="N:M sparsity for language models, with learned channel permutations. Start with: permtriton compile demo",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(compile)
app.command()(inspect)
app.command()(compare)
app.command()(export)
app.command()(doctor)
app.command()(autotune)


def main() -> None:
    """Runs the command line."""
    app()


if __name__ == "__main__":
    main()
