"""One configuration of transformers' and TRL's supervised step on the model of `steps.py`, in its own process: `steps.py` starts it.

The same shapes, random weights, tokens of a sequence and float32 masters; TRL's defaults otherwise: bfloat16 by autocast, activations of
each layer computed again, fused AdamW, a gradient norm, no packing of several sequences. Loading data is not in a step's time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.shapes import QWEN3_06B, TINY, write_model


def trainer(folder: Path, options: dict[str, Any], dry: bool) -> Any:
    """TRL's trainer on random sequences of one length."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    shape = TINY if dry else QWEN3_06B
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(write_model(folder / "model", shape))
    with torch.device("cpu" if dry else "cuda"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=options["attention"], dtype=torch.float32)
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "c": 2}, unk_token="a"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="a", eos_token="b", pad_token="c")
    generator = torch.Generator().manual_seed(0)
    steps = options["warmup"] + options["steps"]
    rows = torch.randint(3, shape.vocabulary, (steps, options["tokens"]), generator=generator).tolist()
    arguments = SFTConfig(
        output_dir=str(folder / "out"),
        max_length=options["tokens"],
        per_device_train_batch_size=1,
        max_steps=steps,
        bf16=not dry,
        use_cpu=dry,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        **options["arguments"],
    )
    return SFTTrainer(
        model=model, args=arguments, train_dataset=Dataset.from_dict({"input_ids": rows}), processing_class=tokenizer
    )


def measure(folder: Path, options: dict[str, Any], dry: bool) -> dict[str, Any]:
    """Seconds and MFU of the steps after the warm-up, and the peak of memory."""
    from transformers import TrainerCallback

    from rlrun.trainer.modeling.flops import model_cost, peak_flops

    began: list[float] = []
    ended: list[float] = []

    def now() -> float:
        if not dry:
            torch.cuda.synchronize()
        return time.perf_counter()

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            began.append(now())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            ended.append(now())

    made = trainer(folder, options, dry)
    made.add_callback(Clock())
    cost = model_cost(made.model)
    made.train()
    seconds = [end - begin for begin, end in zip(began, ended, strict=True)][options["warmup"] :]
    peak = None if dry else peak_flops(torch.cuda.get_device_name())
    found = {
        "tokens/s": statistics.mean(options["tokens"] / one for one in seconds),
        "step ms": 1000 * statistics.mean(seconds),
        "± ms": 1000 * statistics.stdev(seconds) if len(seconds) > 1 else 0.0,
    }
    if peak is not None:
        found["MFU %"] = 100 * statistics.mean(cost.total_flops([options["tokens"]]) / one / peak for one in seconds)
        found["peak GiB"] = torch.cuda.max_memory_allocated() / 2**30
    return found


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--options", type=json.loads, required=True)
    parser.add_argument("--dry", action="store_true")
    given = parser.parse_args()
    (given.folder / "measured.json").write_text(json.dumps(measure(given.folder, given.options, given.dry)))


if __name__ == "__main__":
    main()
