"""Prunes a model, exports it packed, and uploads both to the hub, each into a repository of its own.

hf auth login
python examples/publish.py ./my-model me/my-model-2of4 --data my-text.txt --eval-data my-heldout.txt
"""

import argparse

import permtriton


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder, a name on the hub, a .gguf file, or demo")
    parser.add_argument("repository", help="such as me/my-model-2of4; the packed model goes to me/my-model-2of4-packed")
    parser.add_argument("--recipe", default="default")
    parser.add_argument("--data", help="calibration text; by default what suits the model")
    parser.add_argument("--eval-data", help="held-out text, whose perplexity stands in the model card")
    parser.add_argument("--samples", type=int, help="calibration sequences")
    parser.add_argument("--sequence-length", type=int, help="tokens of each")
    parser.add_argument("--public", action="store_true", help="make new repositories public")
    arguments = vars(parser.parse_args(words))
    model, repository, public = (arguments.pop(name) for name in ("model", "repository", "public"))
    options = {name: value for name, value in arguments.items() if value is not None}

    compiled = permtriton.compile(model, sparsity="2:4", progress=True, **options)
    for name, form in ((repository, None), (f"{repository}-packed", "packed")):
        print(compiled.push_to_hub(name, format=form, private=not public))
    print("Add the dense model's licence to both model cards before you make them public.")


if __name__ == "__main__":
    main()
