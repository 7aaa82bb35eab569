"""A model that Python wrote trains in ebb: refused without --trust-code, and with it every strategy gives the same losses.

The first loss is also what Python computes for a model of constant logits: log(256).
"""
import math
import pathlib
import tempfile
import warnings

import torch

from common import train

warnings.filterwarnings("ignore", category=DeprecationWarning)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(256, 24)
        self.lstm = torch.nn.LSTM(24, 24, batch_first=True)
        self.head = torch.nn.Linear(24, 256)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)

    def forward(self, tokens):
        hidden, _ = self.lstm(self.embedding(tokens))
        return self.head(hidden)


with tempfile.TemporaryDirectory() as models:
    path = pathlib.Path(models) / "model.pt"
    torch.jit.script(Model()).save(str(path))
    common = ["--torchscript", str(path), "--context", "16", "--batch", "2", "--sample-length", "0", "--nproc", "2",
              "--wrap-size", "1000", "--warmup", "0"]

    with tempfile.TemporaryDirectory() as folder:
        _, error = train(folder, *common, "--steps", "1", expect=2)
        assert "--trust-code" in error, error

    losses = {}
    for strategy in ("full_shard", "shard_grad_op", "no_shard", "replicate"):
        with tempfile.TemporaryDirectory() as folder:
            first, _ = train(folder, *common, "--trust-code", "--strategy", strategy, "--steps", "1")
            assert abs(first["train_loss"] - math.log(256)) < 1e-5, (strategy, first["train_loss"])
            summary, _ = train(folder, *common, "--trust-code", "--strategy", strategy, "--steps", "5", "--lr", "1e-2")
            losses[strategy] = summary["eval_loss"]
    reference = losses["full_shard"]
    assert reference < math.log(256), losses
    assert all(abs(loss - reference) < 1e-5 for loss in losses.values()), losses
    print("losses:", losses)
