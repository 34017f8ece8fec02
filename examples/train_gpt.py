"""Train a GPT with DeepSpeed's interface, its state on NVMe: a script as a user would write it.

    python examples/train_gpt.py [CONFIG] [STEPS]

The config is DeepSpeed's JSON; configs/ has some. Change ``offload_param`` and ``offload_optimizer`` in it, or the budgets, and the
losses stay the same to the last bit.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import torch
from torch.optim.lr_scheduler import LambdaLR

import infinity
from infinity.data import BatchStream, open_corpus, sequential_batches
from infinity.models.gpt import GPT, GPTConfig, generate

CONTEXT = 128


def main() -> None:
    config = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[1] / "configs" / "nvme.json"
    steps = int(sys.argv[2]) if len(sys.argv) > 2 else 60
    Path("runs/nvme").mkdir(parents=True, exist_ok=True)  # where configs/nvme.json puts the state

    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=4, width=256, heads=4, context=CONTEXT))
    engine, optimizer, _, scheduler = infinity.initialize(
        model=model,
        config=config,
        lr_scheduler=lambda optimizer: LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10)),
    )

    text, held_out = open_corpus().split()
    stream = BatchStream(text, batch=engine.train_micro_batch_size_per_gpu(), context=CONTEXT)
    for step, (tokens, targets) in zip(range(steps), stream, strict=False):
        loss = engine(tokens, targets)
        engine.backward(loss)
        engine.step()
        if engine.was_step_applied():  # not after every micro-step
            scheduler.step()
        if step % 10 == 9:
            print(f"step {step + 1:3}  loss {loss.item():.3f}  lr {optimizer.param_groups[0]['lr']:.1e}")

    engine.eval()
    with torch.no_grad():
        losses = [engine(tokens, targets).item() for tokens, targets in sequential_batches(held_out, batch=8, context=CONTEXT, limit=8)]
    print(f"held-out loss {math.fsum(losses) / len(losses):.3f} nats per byte")
    print(generate(engine, b"def ", 60, context=CONTEXT, temperature=0.5).decode(errors="replace"))

    engine.close()  # the model is an ordinary one again, with the trained weights
    torch.save(model.state_dict(), "runs/gpt.pt")
    print("saved runs/gpt.pt")


if __name__ == "__main__":
    main()
