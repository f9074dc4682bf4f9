"""Program: `python -m tests.engine.own_class FOLDER` serves two versions of a class of the user's package in the real vLLM.

It writes the class of the served model and the differences from the trainer into `FOLDER/found.json`.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from rlrun.config.models.language_models import ModelConfig
from rlrun.inference.engine_settings import vllm_environment
from rlrun.trainer.modeling.model_files import model_files
from rlrun.trainer.proof.small_models import LONGEST
from rlrun.trainer.proof.start_check import load_checked
from rlrun.trainer.ranks.group import Group
from rlrun.trainer.weights import hf_writer
from tests.support.own_models import path_of, write_model
from tests.trainer.in_vllm import PROMPTS, Served, change, error_of, settings_of

OWN = path_of("GatedForCausalLM")


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    source, weights = write_model(folder / "source"), folder / "weights"
    settings = dataclasses.replace(settings_of(source, weights), model_path=str(weights / "v0"), model_class=OWN)
    os.environ.update(vllm_environment(settings))
    # The subprocess of the registry would import everything again to inspect a class.
    registry = importlib.import_module("vllm.model_executor.models.registry")
    registry._run_in_subprocess = lambda look: look()
    engine = Served()  # before the trainer starts threads
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = Group(0, 1, torch.device("cpu"), init_device_mesh("cpu", (1,)))
    config = ModelConfig(path=str(source), dtype="float32", class_=OWN)
    model = load_checked(config, str(source), group, seq_len=LONGEST)
    files = model_files(model, config, str(source))
    hf_writer.publish_version(model, weights / "v0", files=files, dtype="float32", group=group)
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, 100, (length,), generator=generator).tolist() for length in PROMPTS]
    found: dict[str, object] = {"class": engine.ask("start", settings)}
    first = engine.ask("sample", prompts)
    found["first"] = error_of(model, first)
    change(model)
    found["moved"] = error_of(model, first)
    hf_writer.publish_version(model, weights / "v1", files=files, dtype="float32", group=group)
    engine.ask("update", str(weights / "v1"))
    found["second"] = error_of(model, engine.ask("sample", prompts))
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
