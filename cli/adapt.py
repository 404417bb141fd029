"""The command ``permtriton adapt``: brings an adapter into the channel order of a compiled folder."""

from pathlib import Path

from permtriton import api
from permtriton.cli.console import print_json, show


def run(adapter: Path, to: Path, output: Path | None, *, trust_remote_code: bool, json: bool) -> None:
    """Writes the adapter and says what was reordered; arguments and errors are those of `permtriton.adapt`."""
    report = api.adapt(adapter, to, output, trust_remote_code=trust_remote_code)
    if json:
        print_json(report)
    else:
        rows = [
            ("reordered", f"{report['reordered']} of {report['tensors']} tensors"),
            ("written to", report["output"]),
        ]
        show("Adapter", rows)
