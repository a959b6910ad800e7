"""Save to an S3 bucket, stop, and resume from it.

    python examples/s3_quickstart.py s3://my-bucket/quickstart
    python examples/s3_quickstart.py s3://demo/run-1 --endpoint-url http://127.0.0.1:8333

The first form is for AWS, with the credentials that every AWS tool finds. The second form is for a
compatible store, such as the one that `make servers` starts on this machine. Run it again, and it
resumes from its newest checkpoint.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import nn

import ckpipe


def train(url: str, options: dict[str, Any], steps: int) -> None:
    """Train some more steps after the newest checkpoint."""
    model = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512))
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer, "rng": ckpipe.RngState()}

    with ckpipe.SyncPipeline(
        url, guard=optimizer, keep_last=2, backends={"s3": options}
    ) as pipeline:
        restored = pipeline.load(state)
        done = restored.step if restored else 0
        print(f"going on from step {done}" if restored else "starting from scratch")
        for step in range(done + 1, done + steps + 1):
            inputs = torch.randn(64, 512)
            loss = (model(inputs) - inputs).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 5 == 0:
                pipeline.save(state, step=step)  # returns once the state is copied
                print(f"step {step:4d}   loss {loss.item():.4f}   saving")
    # Leaving the block has waited for the uploads.
    with ckpipe.SyncPipeline(url, backends={"s3": options}) as pipeline:
        for info in pipeline.steps():
            print(f"in the bucket: {info.id}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("url", help="s3://bucket/prefix")
    parser.add_argument("--endpoint-url", help="the URL of a compatible store; AWS without")
    parser.add_argument("--region", help="the bucket's region; else what the environment says")
    parser.add_argument("--steps", type=int, default=10, help="how many more steps to train")
    arguments = parser.parse_args()
    given = {"endpoint_url": arguments.endpoint_url, "region": arguments.region}
    train(arguments.url, {name: value for name, value in given.items() if value}, arguments.steps)
