"""How much memory does a run take beside its budgets, and does that grow with the model?

Each case is a process of its own. A model of about 60 M parameters and one with four times the layers, built on the meta device,
trained with activation checkpointing at host budgets of 64, 128 and 256 MiB. ``peak_bytes`` is the resident set's high-water mark from
after the engine's construction to after the last step; ``beside_bytes`` is what of it is neither the process before the engine (Python
and torch) nor budget: activations, autograd's temporaries and the constant of the engine.

    python benchmarks/memory_peak.py [--layers 8 --width 768 --batch 4 --context 128 --steps 4 --directory DIR]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from typing import Any

import torch
from _measure import MIB, emit, memory_bytes, provenance, reset_high_water_mark, say, scratch_directory

from infinity import Engine
from infinity.data import BatchStream, open_corpus
from infinity.models.gpt import GPT, GPTConfig

HOST_MIB = (64, 128, 256)
DEVICE_MIB = 96


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """One case, in this process."""
    offload = {"device": "nvme", "nvme_path": arguments.directory}
    config = {
        "train_micro_batch_size_per_gpu": arguments.batch,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 3, "offload_param": offload, "offload_optimizer": offload},
        "memory": {"device": f"{DEVICE_MIB}MiB", "host": f"{arguments.host_mib}MiB"},
    }
    shape = GPTConfig(layers=arguments.layers, heads=8, width=arguments.width, context=arguments.context, checkpoint=True)
    batches = iter(BatchStream(open_corpus().split()[0], batch=arguments.batch, context=arguments.context))
    tokens, targets = next(batches)
    small = torch.nn.Linear(8, 8).bfloat16()  # torch's own first-use allocations come before the base is taken
    small(torch.zeros(8, 8, dtype=torch.bfloat16)).sum().backward()
    torch.manual_seed(0)
    with torch.device("meta"):
        model = GPT(shape)
    base = memory_bytes("VmRSS")
    with Engine(model, config) as engine:
        constructed, construction = memory_bytes("VmRSS"), memory_bytes("VmHWM")
        reset_high_water_mark()
        device_bytes = 0
        for _ in range(arguments.steps):
            engine.backward(engine(tokens, targets))
            engine.step()
            tokens, targets = next(batches)
        engine.finish()
        device_bytes = max(step.device_bytes for step in engine.take_finished_steps())
        peak = memory_bytes("VmHWM")
    return {
        "parameters": shape.numel,
        "state_bytes": 12 * shape.numel,
        "layers": arguments.layers,
        "host_budget_bytes": arguments.host_mib * MIB,
        "device_budget_bytes": DEVICE_MIB * MIB,
        "device_bytes": device_bytes,
        "base_bytes": base,
        "constructed_bytes": constructed,
        "construction_peak_bytes": construction,
        "peak_bytes": peak,
        "beside_bytes": peak - base - arguments.host_mib * MIB - device_bytes,
        "checkpoint_bytes": 2 * arguments.layers * arguments.batch * arguments.context * arguments.width,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--directory", default=None, help="on the drive to use; default: runs/")
    parser.add_argument("--host-mib", type=int, default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.host_mib is not None:
        print(json.dumps(measure(arguments)))
        return
    where = provenance()
    with scratch_directory(arguments.directory) as directory:
        for layers in (arguments.layers, 4 * arguments.layers):
            for host_mib in HOST_MIB:
                given = {"layers": layers, "width": arguments.width, "context": arguments.context, "batch": arguments.batch}
                given |= {"steps": arguments.steps, "directory": directory, "host-mib": host_mib}
                command = [sys.executable, __file__, *(f"--{name}={value}" for name, value in given.items())]
                figures = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
                say(
                    f"{figures['parameters'] / 1e6:.0f} M parameters, host {host_mib} MiB: peak {figures['peak_bytes'] / MIB:.0f} MiB, "
                    f"beside the budgets {figures['beside_bytes'] / MIB:.0f} MiB"
                )
                emit("memory_peak", f"{layers} layers, host {host_mib} MiB", figures, where)


if __name__ == "__main__":
    main()
