"""vLLM in a process of its own, which imports nothing of ours: `python -P vllm_process.py JOB RESULTS`.

The job is JSON, made by `vllm_peer`. A line of JSON is added to the results when vLLM is there, and one after each run.
"""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import perf_counter
from typing import Any
from unittest.mock import Mock

PACKAGES = "torch", "triton", "flashinfer-python", "transformers"


def main() -> None:
    """Serves all that the job says."""
    job_path, results_path = map(Path, sys.argv[1:])
    job = json.loads(job_path.read_text())
    import vllm

    engine = vllm.LLM(**job["options"])
    with results_path.open("a") as results:
        print(json.dumps({"version": vllm.__version__} | about()), file=results, flush=True)
        for number, work in enumerate(job["works"]):
            prompts = [{"prompt_token_ids": ids} for ids in work["prompts"]]
            serve_all(engine, prompts, work["outputs"])  # not measured: it is slower when it first serves them
            for _ in range(work["rounds"]):
                if job["options"]["enable_prefix_caching"]:
                    engine.reset_prefix_cache()
                row = serve_all(engine, prompts, work["outputs"])
                print(json.dumps(row | {"work": number}), file=results, flush=True)


def about() -> dict[str, Any]:
    """Versions of what it runs on, and which modules are stand-ins that do nothing."""
    packages = {}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            packages[name] = version(name)
    stand_ins = sorted(name for name, module in sys.modules.items() if isinstance(module, Mock) and "." not in name)
    return {"packages": packages, "stand_ins": stand_ins}


def serve_all(engine: Any, prompts: list[Any], outputs: list[int]) -> dict[str, Any]:
    """All requests at once, as `LLM.generate` serves them: answers come when they are whole."""
    from vllm import SamplingParams

    # Without `min_tokens`, for which it would go through logits once more.
    how = {"temperature": 0, "ignore_eos": True, "detokenize": False}
    asked = [SamplingParams(max_tokens=tokens, **how) for tokens in outputs]
    start = perf_counter()
    answers = engine.generate(prompts, asked, use_tqdm=False)
    seconds = perf_counter() - start
    return {"seconds": seconds, "tokens": [len(answer.outputs[0].token_ids) for answer in answers]}


if __name__ == "__main__":
    main()
