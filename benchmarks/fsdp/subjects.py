"""Models of the cases of the FSDP benchmark, in Python; subject.cpp is the C++ counterpart and draws in the same order."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

LORA_RANK = 8


def checkpointed(block_class):
    """Its class with activations recomputed in backward. FSDP's hooks are around the checkpoint, as its documentation has it."""

    class Checkpointed(block_class):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=False)

    return Checkpointed


class Adapted(nn.Module):
    """A frozen linear layer and its adapter, as parameters of one module."""

    def __init__(self, linear):
        super().__init__()
        self.linear = linear
        self.a = nn.Parameter(torch.empty(LORA_RANK, linear.in_features).normal_(0.0, 0.02))
        self.b = nn.Parameter(torch.zeros(linear.out_features, LORA_RANK))

    def forward(self, x):
        return self.linear(x) + F.linear(F.linear(x, self.a), self.b)


def make_subject(case, model):
    """Turns a GPT into what `case` trains."""
    if case == "checkpointing":
        for block in model.blocks:
            block.__class__ = checkpointed(block.__class__)
    elif case == "lora":
        model.requires_grad_(False)
        for block in model.blocks:
            for name in ["qkv", "proj", "up", "down"]:
                setattr(block, name, Adapted(getattr(block, name)))
    return model


class LowPrecisionFloor:
    """A bfloat16 model with a float32 copy of its parameters, which the optimizer works on."""

    def __init__(self, model):
        self.masters = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
        self.working = list(model.bfloat16().parameters())

    @torch.no_grad()
    def update(self, optimizer):
        for master, working in zip(self.masters, self.working):
            master.grad = working.grad.float()
            working.grad = None
        optimizer.step()
        optimizer.zero_grad()
        for master, working in zip(self.masters, self.working):
            working.copy_(master)
