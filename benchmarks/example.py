"""The engine of `docs/examples` in turns with `benchmarks.engine`: equal requests, shape of model, kernels and memory.

python -m benchmarks.example [--model NAME] [--rounds N] [--requests N]
"""

import runpy
from statistics import median
from time import perf_counter

import torch
import typer

from vmmkv.cli.output import print_json

from .engine.model import MODELS, random_model
from .environment import complete, environment
from .generate.models import build
from .serve.measure import SATURATION, SEED, Settings, make_engine, run_load
from .serve.workloads import Limits, make_workload


def main(model: str = "Llama-3.1-8B", rounds: int = 3, requests: int = 300, gib: float = 16, shorten: int = 1) -> None:
    """Print output tokens a second of each engine, by round, and the ratio of their medians, as JSON."""
    device, max_bytes = torch.device("cuda" if torch.cuda.is_available() else "cpu"), int(gib * 2**30)
    config, ours = MODELS[model.lower()], random_model(MODELS[model.lower()], 8192, device, torch.bfloat16)
    workload = make_workload(None, Limits(requests, 400_000, 8192, 8192, shorten), SEED)
    prompts, outputs = workload.prompts(config.vocab_size, SEED), [request.output for request in workload.requests]
    settings = Settings(ours, max_bytes, float("inf"))
    engine = make_engine(settings, workload, "vmm")
    example = runpy.run_path("docs/examples/engine.py")
    other = example["Engine"](example["Model"](build(model, None, device), 8192), 256, 2048, max_bytes=max_bytes)
    result = {"environment": environment(device), "model": model}
    speeds: dict[str, list[float]] = {"benchmarks.engine": [], "example": []}
    for _ in range(rounds + 1):
        speeds["benchmarks.engine"].append(run_load(settings, workload, engine, SATURATION)[1]["output_tokens_per_s"])
        begin = perf_counter()
        for prompt, count in zip(prompts, outputs):
            other.add(prompt.tolist(), count)
        other.run()
        speeds["example"].append(sum(outputs) / (perf_counter() - begin))
        other.cache.trim()  # it must not find the prompts of this round in the next one
    result |= {"output_tokens_per_s": {name: values[1:] for name, values in speeds.items()}}  # the first warms up
    result["ratio"] = median(speeds["example"][1:]) / median(speeds["benchmarks.engine"][1:])
    print_json(complete(result))


if __name__ == "__main__":
    typer.run(main)
