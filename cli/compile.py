"""``permtriton compile``."""

from pathlib import Path
from typing import Annotated, Any

import typer

from permtriton import compiler, load, memory
from permtriton.artifact import check_output
from permtriton.cli import options
from permtriton.cli.console import BarProgress, clear_errors, grouped, out, print_json, table
from permtriton.cli.inspect import destination


def compile(
    model: options.ModelArgument,
    sparsity: options.Sparsity = None,
    importance: options.Importance = None,
    permutation: options.Permutation = None,
    weight_update: options.WeightUpdate = None,
    update_mask: options.UpdateMask = None,
    layout: options.Layout = None,
    o_proj: options.OProj = None,
    recipe: options.Recipe = None,
    skip_indivisible: options.SkipIndivisible = None,
    calibration: options.Calibration = None,
    samples: options.Samples = None,
    sequence_length: options.SequenceLength = None,
    eval_text: options.EvalText = None,
    block_size: options.BlockSize = None,
    sinkhorn_rounds: options.SinkhornRounds = None,
    tau_start: options.TauStart = None,
    tau_end: options.TauEnd = None,
    epochs: options.Epochs = None,
    learning_rate: options.LearningRate = None,
    weight_decay: options.WeightDecay = None,
    batch_size: options.BatchSize = None,
    micro_batch_size: options.MicroBatchSize = None,
    learn_layers: options.LearnLayers = None,
    start: options.Start = None,
    start_noise: options.StartNoise = None,
    clamp_logits: options.ClampLogits = None,
    group_scale: options.GroupScale = None,
    keep_epoch: options.KeepEpoch = None,
    activation_checkpointing: options.ActivationCheckpointing = None,
    base_order: options.BaseOrder = None,
    seed: options.Seed = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    output: Annotated[
        Path | None, typer.Option(help="Folder to write; MODEL-NofM here by default.", rich_help_panel=options.RUNNING)
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an earlier output.", rich_help_panel=options.RUNNING)
    ] = False,
    config: options.ConfigFile = None,
    json: options.Json = False,
    trust_remote_code: options.TrustRemoteCode = False,
) -> None:
    """Prune MODEL to N:M sparsity in the best channel order and write a Hugging Face checkpoint (see --layout)."""
    arguments = dict(locals())
    with clear_errors():
        chosen = options.build_config(model, recipe, config, arguments)
        pattern = chosen.sparsity
        target = output or Path(f"{Path(model).resolve().name}-{pattern.kept}of{pattern.group}")
        check_output(target, overwrite=overwrite)
        source = load.Source(model, dtype, device, trust_remote_code)
        progress = BarProgress()
        progress.say(f"loading {model}")
        loaded, tokenizer = load.load_original(source)
        windows, text = options.held_out_windows(source, eval_text, tokenizer, loaded)
        if windows is None:
            progress.say(f"no held-out evaluation: {text}")
        compiled = compiler.compile(
            loaded,
            tokenizer,
            chosen,
            evaluation_windows=windows,
            progress=progress,
            resume_path=target.resolve().with_name(f".{target.name}.learning.safetensors"),
        )
        compiled.report["evaluation"]["text"] = text
        progress.say(f"saving and verifying {target}")
        compiled.save(target, overwrite=overwrite)
        if json:
            print_json(compiled.report)
        else:
            print_report(compiled.report, target)


def print_report(report: dict[str, Any], target: Path) -> None:
    """Prints the result tables of one compilation."""
    spaces = table("Permutations", "permutation", "channels", "where it went", "moved")
    told = [(space["name"], str(space["channels"]), destination(space)) for space in report["spaces"]]
    for row, members in grouped(told):
        moved = [report["spaces"][number]["moved"] for number in members]
        spaces.add_row(*row, " to ".join(dict.fromkeys((str(min(moved)), str(max(moved))))))
    out.print(spaces)
    result = table("Result", "", "", show_header=False)
    evaluation = report["evaluation"]
    if "dense" in evaluation:
        name = "perplexity" if evaluation["measure"] == "perplexity" else "cosine with dense"
        result.add_row(f"held-out {name}, dense", f"{evaluation['dense']:.3f}")
        result.add_row(f"held-out {name}, compiled", f"{evaluation['compiled']:.3f}")
    sparsities = report["sparsity_by_layer"].values()
    share = report["pruned_parameters"] / report["parameters"]
    result.add_row(
        "zeros in pruned weights",
        " to ".join(dict.fromkeys(f"{share:.2%}" for share in (min(sparsities), max(sparsities)))),
    )
    result.add_row(
        "share of parameters pruned", f"{share:.1%} ({report['pruned_parameters']:,} of {report['parameters']:,})"
    )
    epochs, kept = report["learning"]["epochs"], report["learning"]["kept_epoch"]
    if epochs:
        result.add_row("learning loss, base order", f"{epochs[0]['loss']:.4f}")
        result.add_row(f"learning loss, epoch {kept} of {len(epochs) - 1}", f"{epochs[kept]['loss']:.4f}")
    stages = ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in report["seconds"].items())
    result.add_row("seconds", stages)
    result.add_row("peak memory", f"{memory.format_bytes(report['memory']['peak'])} on {report['device']}")
    result.add_row("linears left dense", "; ".join(f"{k}: {v}" for k, v in report["skipped"].items()) or "none")
    result.add_row(
        "verified",
        f"{report['verification']['pruned_weights']} pruned weights; reloaded: {report['verification']['reloaded']}",
    )
    result.add_row("written to", str(target))
    out.print(result)
