"""vLLM asleep and awake, in a process that imports nothing of ours: `python -P sleeping_process.py JOB RESULTS`.

The job is JSON, made by `sleeping`. A line of JSON is added to the results when vLLM is there, and one after each
round.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

PROMPT = list(range(1, 65))
"""Token ids; who is awake answers."""


def main() -> None:
    """Lets vLLM sleep as often as the job says."""
    job_path, results_path = map(Path, sys.argv[1:])
    job = json.loads(job_path.read_text())
    import torch
    import vllm

    engine = vllm.LLM(**job["options"])
    answer(engine)
    with results_path.open("a") as results:
        print(json.dumps({"version": vllm.__version__}), file=results, flush=True)
        for _ in range(job["rounds"]):
            free = torch.cuda.mem_get_info()[0]
            row: dict[str, float] = {"sleep_ms": took(lambda: engine.sleep(level=1))}
            row["freed_bytes"] = torch.cuda.mem_get_info()[0] - free
            row["wake_weights_ms"] = took(lambda: engine.wake_up(tags=["weights"]))
            row["wake_kv_ms"] = took(lambda: engine.wake_up(tags=["kv_cache"]))
            answer(engine)
            print(json.dumps(row), file=results, flush=True)


def answer(engine: Any) -> None:
    """Generates some tokens."""
    from vllm import SamplingParams

    asked = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    (answered,) = engine.generate([{"prompt_token_ids": PROMPT}], [asked], use_tqdm=False)
    assert len(answered.outputs[0].token_ids) == 8


def took(work: Callable[[], object]) -> float:
    """Milliseconds."""
    start = perf_counter()
    work()
    return (perf_counter() - start) * 1e3


if __name__ == "__main__":
    main()
