"""TRL's GRPO with rollouts on rows: the same completions, losses and weights as with transformers' own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from conftest import run_python
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

import vmmkv
from vmmkv.integrations import continuous_batching as rows

trl = pytest.importorskip("trl", reason="TRL is not installed: pip install vmmkv[rl]")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]

WORDS = 61


class Run(NamedTuple):
    """What came of a training."""

    completions: list[list[list[int]]]
    losses: list[float]
    weights: torch.Tensor
    held: list[int]
    """Bytes of K and V while rewards were computed."""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A word for each token."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *map(str, range(WORDS))])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side="left", **special)


def make_model() -> PreTrainedModel:
    config = Qwen3Config(
        vocab_size=WORDS + 3, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=256, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    return Qwen3ForCausalLM(config)


def train(folder: Path, pool: vmmkv.FramePool | None, *, sharing: bool = False, **options: Any) -> Run:
    """Trains a tiny model for two steps, on rows if there is a pool."""
    import datasets
    from datasets.table import InMemoryTable
    from pyarrow import table

    model, run = make_model(), Run([], [], torch.empty(0), [])
    blocks = {} if pool else {"num_blocks": 64}
    arguments = trl.GRPOConfig(
        output_dir=str(folder), per_device_train_batch_size=8, num_generations=4, max_completion_length=12, max_steps=2,
        use_transformers_continuous_batching=True, report_to=[], use_cpu=True, bf16=False, logging_steps=1, seed=3,
        save_strategy="no", beta=0.0, gradient_checkpointing=False, disable_tqdm=True,
        transformers_continuous_batching_config={"allow_block_sharing": sharing, "max_batch_tokens": 128, **blocks},
    )  # fmt: skip

    def reward(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        run.completions.append([list(each) for each in completion_ids])
        run.held.append(pool.stats().used_bytes if pool else 0)
        return [float(sum(map(ord, each)) % 7) for each in completions]

    if pool:
        rows.enable(model, pool=pool, **options)
    prompts = [" ".join(str((7 * number + word) % WORDS) for word in range(20)) for number in range(8)]
    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=arguments,
        train_dataset=datasets.Dataset(InMemoryTable(table({"prompt": prompts})), fingerprint="prompts"),
        processing_class=make_tokenizer(),
    )
    trainer.train()
    run.losses.extend(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
    weights = torch.cat([each.detach().flatten() for each in model.parameters()])
    return run._replace(weights=weights)


def make_pool() -> vmmkv.FramePool:
    return vmmkv.FramePool("16MiB", device="cpu", page_size=4096)


def test_training_is_the_same_as_without_rows(tmp_path: Path) -> None:
    """In a process of its own: TRL leaves threads behind. A kept manager leaves no memory to training."""
    code = """
        from test_rollouts_trl import Path, make_pool, train
        folder, pool = Path(sys.argv[1]), make_pool()
        stock, ours = train(folder, None), train(folder, make_pool())
        assert ours.completions == stock.completions
        assert ours.losses == stock.losses
        assert ours.weights.equal(stock.weights)
        assert ours.held == [0, 0]
        kept = train(folder, pool, sharing=True, persistent=True, raise_errors=True)
        assert kept.held == [0, 0]
        assert pool.stats().physical_bytes == 0
        assert len(kept.completions) == len(kept.losses) == 2
    """
    told = {"HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    child = run_python(code, str(tmp_path), env=os.environ | told)
    assert child.returncode == 0, child.stderr
