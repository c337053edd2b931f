"""vLLM in a process of its own, which imports nothing of ours: `python -P vllm_process.py JOB RESULTS`.

The job is JSON, made by `vllm_peer`. A line of JSON is added to the results when vLLM is there, and one after each run.
"""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import perf_counter, sleep
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
            for times in work["runs"]:
                if job["options"]["enable_prefix_caching"]:
                    engine.reset_prefix_cache()
                if times is None:
                    row = serve_all(engine, prompts, work["outputs"])
                else:
                    row = serve_coming(engine, prompts, work["outputs"], times)
                print(json.dumps(row | {"work": number}), file=results, flush=True)


def about() -> dict[str, Any]:
    """Versions of what it runs on, and which modules are stand-ins that do nothing."""
    packages = {}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            packages[name] = version(name)
    stand_ins = sorted(name for name, module in sys.modules.items() if isinstance(module, Mock) and "." not in name)
    return {"packages": packages, "stand_ins": stand_ins}


def sampling(tokens: int, **how: Any) -> Any:
    """The likeliest tokens, just so many: without `min_tokens`, for which it would go through logits once more."""
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, **how)


def serve_all(engine: Any, prompts: list[Any], outputs: list[int]) -> dict[str, Any]:
    """All requests at once, as `LLM.generate` serves them: answers come when they are whole."""
    asked = list(map(sampling, outputs))
    start = perf_counter()
    answers = engine.generate(prompts, asked, use_tqdm=False)
    seconds = perf_counter() - start
    return {"seconds": seconds, "tokens": [len(answer.outputs[0].token_ids) for answer in answers]}


def serve_coming(engine: Any, prompts: list[Any], outputs: list[int], times: list[float]) -> dict[str, Any]:
    """The first requests as they come, their tokens streamed: when each had its first and its last one, and the longest
    time between two."""
    from vllm.sampling_params import RequestOutputKind

    core = engine.llm_engine
    asked = [sampling(tokens, output_kind=RequestOutputKind.DELTA) for tokens in outputs[: len(times)]]
    first, last, gaps = ([0.0] * len(times) for _ in range(3))
    tokens = [0] * len(times)
    arrived, start = 0, perf_counter()
    while arrived < len(times) or core.has_unfinished_requests():
        now = perf_counter() - start
        while arrived < len(times) and times[arrived] <= now:
            core.add_request(f"request-{arrived}", prompts[arrived], asked[arrived])
            arrived += 1
        if not core.has_unfinished_requests():
            sleep(max(times[arrived] - now, 0.0))
            continue
        answers = core.step()
        now = perf_counter() - start
        for answer in answers:
            request, came = int(answer.request_id.split("-")[1]), len(answer.outputs[0].token_ids)
            if came and tokens[request]:
                gaps[request] = max(gaps[request], now - last[request])
            elif came:
                first[request] = now
            last[request] = now if came else last[request]
            tokens[request] += came
    return {"seconds": perf_counter() - start, "tokens": tokens, "first": first, "last": last, "gaps": gaps}


if __name__ == "__main__":
    main()
