"""The command ``permtriton adapt``: brings an adapter into the channel order of a compiled folder."""

from pathlib import Path
from typing import Annotated, Any

import typer

from permtriton import api
from permtriton.cli.console import print_json, show
from permtriton.cli.options import Json, TrustRemoteCode, output_flag

Output: Any = output_flag("Folder to write; ADAPTER-for-FOLDER here by default.")


def adapt(
    adapter: Annotated[
        Path, typer.Argument(metavar="ADAPTER", help="An adapter of PEFT that was trained on the dense model.")
    ],
    to: Annotated[Path, typer.Option(help="The folder that was compiled from that model, of layout portable.")],
    output: Output = None,
    trust_remote_code: TrustRemoteCode = False,
    json: Json = False,
) -> None:
    report = api.adapt(adapter, to, output, trust_remote_code=trust_remote_code)
    if json:
        print_json(report)
    else:
        rows = [
            ("reordered", f"{report['reordered']} of {report['tensors']} tensors"),
            ("written to", report["output"]),
        ]
        show("Adapter", rows)
