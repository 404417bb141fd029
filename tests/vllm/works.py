"""Whether vLLM itself works on this machine: it serves the dense demo model on two ranks, without permtriton's plugin.

python tests/vllm/works.py      exit code 0 if it does; .ci/run skips the tests of the plugin where it does not
"""

import os
from pathlib import Path

os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="0|1", VLLM_ENABLE_V1_MULTIPROCESSING="0",
                  VLLM_LOGGING_LEVEL="ERROR", VLLM_PLUGINS="", HF_HUB_OFFLINE="1")  # fmt: skip

DEMO = Path(__file__).resolve().parents[2] / "permtriton" / "demo"

if __name__ == "__main__":
    from vllm import LLM, SamplingParams

    options = {"enforce_eager": True, "max_model_len": 64, "max_num_seqs": 2, "dtype": "float32"}
    llm = LLM(str(DEMO), tensor_parallel_size=2, **options)
    (answer,) = llm.generate("The function returns", SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    assert len(answer.outputs[0].token_ids) == 4
