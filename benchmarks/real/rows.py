"""The rows of the benchmark: what prunes the model, ours and the peers', each by a command of its own."""

import sys
from dataclasses import dataclass
from pathlib import Path

PEERS = Path(__file__).resolve().parent / "peers"
DENSE = "dense"
OTHER_WINDOWS = 16  # of text of another domain, on which every row is evaluated, too
# Row -> the options of permtriton compile.
OURS = {
    "magnitude": "--recipe mask --importance magnitude",
    "wanda": "--recipe mask --importance wanda",
    "ria": "--recipe mask --importance ria",
    "sparsegpt": "--recipe sparsegpt",
    "magnitude + heuristic": "--recipe heuristic,mask --importance magnitude",
    "wanda + heuristic": "--recipe heuristic,mask --importance wanda",
    "ria + heuristic": "--recipe heuristic,mask --importance ria",
    "heuristic + sparsegpt": "--recipe heuristic,sparsegpt",
    "refit": "--recipe refit",
    "heuristic + refit": "--recipe heuristic,refit",
    "published (2 of 50 epochs)": "--recipe permllm --learn-epochs 2",  # to end within minutes
    "ria + published (2 of 50 epochs)": "--recipe permllm --importance ria --learn-epochs 2",
    "values": "--recipe values",
    "fast": "--recipe fast",
    "default": "--recipe default",
    "default with dense share 0.1": "--recipe default --dense-share 0.1",
    "default with row weights": "--recipe default --heuristic-row-weights fisher",
    "default without residual targets": "--recipe default --refit-residual-targets 0",
    "default with a learned order": "--recipe heuristic,learned,refit,distill --learn-epochs 4 --learn-batch-size 4 "
    "--learn-learning-rate 0.02 --distill-steps 32 --distill-batch-size 2 --distill-learning-rate 2e-3 "
    "--distill-optimizer adafactor",
    "default with written text": "--recipe default --generated 64",  # two sequences per sample
    "best": "--recipe best",
    "wanda + heuristic (fused)": "--recipe heuristic,mask --importance wanda --layout fused",
    "ria + heuristic (fused)": "--recipe heuristic,mask --importance ria --layout fused",
    "wanda + learned (fused)": "--recipe heuristic,learned,mask --importance wanda --layout fused --learn-epochs 4 "
    "--learn-batch-size 4 --learn-learning-rate 0.02",  # 32 steps; of more, a smaller rate is better
    "heuristic + sparsegpt (fused)": "--recipe heuristic,sparsegpt --layout fused",
    "fast (fused)": "--recipe fast --layout fused",
    "default (fused)": "--recipe default --layout fused",
}
# Row -> the peer, whose script, requirements and environment have its name, and its method.
THEIRS = {
    "llm-compressor sparsegpt": ("llmcompressor", "sparsegpt"),
    "llm-compressor sparsegpt by oneDNN": ("llmcompressor", "sparsegpt by oneDNN"),
    "llm-compressor wanda": ("llmcompressor", "wanda"),
    "modelopt sparsegpt": ("modelopt", "sparsegpt"),
    "modelopt sparse_magnitude": ("modelopt", "sparse_magnitude"),
}
ROWS = (DENSE, *OURS, *THEIRS)


@dataclass(frozen=True)
class Job:
    """What every row is given.

    Attributes:
        model: folder of the dense model.
        text: file that the calibration sequences are drawn from, and what else a step reads of the same text.
        ids: those sequences, a safetensors file with ``input_ids``, int64 ``[samples, tokens]``, for the peers.
        samples: number of the sequences.
        length: tokens of each.
        seed: seed of what a method draws.
        peers: folder with an environment for each peer.
    """

    model: Path
    text: Path
    ids: Path
    samples: int
    length: int
    seed: int
    peers: Path


def command(row: str, job: Job, output: Path) -> list[str]:
    """Returns the command that prunes the model by the method of a row and writes a folder."""
    if row in THEIRS:
        peer, method = THEIRS[row]
        python = job.peers / peer / "bin" / "python"
        return [str(python), str(PEERS / f"{peer}.py"), method, str(job.model), str(job.ids), str(output)]
    given = {
        "--calibration": job.text,
        "--samples": job.samples,
        "--sequence-length": job.length,
        "--seed": job.seed,
        "--eval-data": "none",
        "--output": output,
    }
    words = [sys.executable, "-m", "permtriton", "compile", str(job.model), *OURS[row].split(), "--overwrite"]
    return words + [str(word) for flag in given.items() for word in flag]
