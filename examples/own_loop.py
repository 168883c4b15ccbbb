"""The GPT of gpt.py in a user's training loop: `paceline.attach` adds the strategy, the rest is plain PyTorch.

Run it in this folder:

    paceline compare --script own_loop.py --ranks 2 --strategies ddp,allreduce,none,single
    torchrun --nproc-per-node 2 own_loop.py ddp
    python own_loop.py                             # One process: the same batches, the same result.
"""

from __future__ import annotations

import argparse
import math

import torch
from gpt import make_optimizer, make_workload, next_character_loss
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

import paceline

MICRO_BATCHES = 2
WARM_UP_STEPS = 20


def main(strategy: str | None, batch: int, steps: int) -> None:
    """Train the model, then test it."""
    torch.manual_seed(0)
    workload = make_workload()
    inputs, targets = workload.train

    sync = paceline.attach(workload.model, make_optimizer, strategy)
    schedule = LambdaLR(sync.optimizer, lambda step: warm_up(step) * cosine(step / steps))

    def backward(samples: Tensor) -> Tensor:
        loss = next_character_loss(sync.model(inputs[samples]), targets[samples])
        # Strategies average over ranks. This weight makes that the mean over the batch, even if shares are uneven.
        (loss * sync.weight(len(samples), batch)).backward()
        sync.note(loss=loss, samples=len(samples))  # Reports the loss to `paceline compare`.
        return loss.detach()

    order = torch.Generator().manual_seed(0)  # The same on all ranks: they draw one batch and divide it.
    for step in range(1, steps + 1):
        drawn = torch.randint(len(inputs), (batch,), generator=order)
        *others, last = drawn[sync.rank :: sync.ranks].chunk(MICRO_BATCHES)
        with sync.accumulate():  # Gradients are accumulated, and not sent yet.
            for samples in others:
                backward(samples)
        loss = backward(last)
        sync.step(max_norm=1.0)
        schedule.step()
        if step % 20 == 0 and sync.rank == 0:
            print(f"step {step:5}  loss {loss:.4f}  lr {schedule.get_last_lr()[0]:.1e}", flush=True)

    inputs, targets = workload.test
    with sync.agreed() as model, torch.no_grad():  # Every rank must call this: ranks may have to communicate.
        test_loss = float(next_character_loss(model(inputs), targets))
    if sync.rank == 0:
        print(f"test loss {test_loss:.6f} after {steps} steps of {sync.strategy.name} on {sync.ranks} rank(s)")
    sync.close()


def warm_up(step: int) -> float:
    """Return the factor of the learning rate during the warm-up."""
    return min(1.0, (step + 1) / WARM_UP_STEPS)


def cosine(progress: float) -> float:
    """Return the factor of the learning rate during the cosine decay."""
    return (1 + math.cos(math.pi * progress)) / 2


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a small GPT under a strategy.")
    parser.add_argument("strategy", nargs="?", help="name of a strategy (see `paceline strategies`) [default: ddp]")
    parser.add_argument(
        "--batch", type=int, default=32, help="global batch: samples per step over all ranks; at least one per rank"
    )
    parser.add_argument("--steps", type=int, default=200)
    main(**vars(parser.parse_args()))
