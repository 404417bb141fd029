"""Which weights did a compilation keep, and where did the channels go? Compares the masks of compiled folders.

    python examples/read_masks.py my-model-wanda my-model-permllm --linear model.layers.0.mlp.down_proj

`permtriton report my-model-wanda my-model-permllm --masks LINEAR` draws the same masks.
"""

import argparse
from itertools import combinations

import permtriton


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", help="outputs of permtriton compile, of the same model")
    parser.add_argument("--linear", help="name of a pruned linear; the last one by default")
    options = parser.parse_args(arguments)
    masks = {folder: permtriton.read_masks(folder) for folder in options.folders}
    linear = options.linear or next(iter(masks.values())).linears[-1]
    kept = {folder: each.mask(linear) for folder, each in masks.items()}  # bool, in the dense model's order
    for folder, each in masks.items():
        index = each.permutation(linear)  # channel j of the folder was channel index[j] of the dense model
        moved = (index != index.sort().values).sum()
        by_input = kept[folder].float().mean(dim=0)  # without a permutation, the mean of each group is 1/2
        print(f"{folder}: {linear} {list(kept[folder].shape)}, {moved} of {len(index)} input channels moved; an input "
              f"channel keeps {by_input.min():.0%} to {by_input.max():.0%} of its weights")  # fmt: skip
    for first, second in combinations(kept, 2):
        shared = (kept[first] & kept[second]).sum() / kept[first].sum()
        print(f"{first} and {second} share {shared:.0%} of the kept weights")


if __name__ == "__main__":
    main()
