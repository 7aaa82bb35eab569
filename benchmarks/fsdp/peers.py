"""One rank of a PyTorch peer: FSDP2, FSDP1, DDP, or a plain model without communication.

Speaks the protocol of benchmarks/harness/lanes.py on stdin and stdout; bench_fsdp.cpp is its C++ counterpart. Both build
the same GPT in the same order from the same seed, so they start from the same weights and see the same tokens.
"""
import argparse
import ctypes
import json
import math
import os
import pathlib
import resource
import sys
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
sys.dont_write_bytecode = True

from fsdp.subjects import LowPrecisionFloor, make_subject  # noqa: E402


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(dim)
        self.norm2 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x):
        batch, length, dim = x.shape
        split = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(split[0], split[1], split[2], is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(batch, length, dim))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    """examples/gpt/gpt.cpp, line by line: the same draws in the same order give the same weights."""

    def __init__(self, vocabulary, context, dim, heads, layers):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, dim)
        self.positions = nn.Embedding(context, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        residual = 0.02 / math.sqrt(2.0 * layers)
        nn.init.normal_(self.tokens.weight, 0.0, 0.02)
        nn.init.normal_(self.positions.weight, 0.0, 0.02)
        for block in self.blocks:
            for linear, std in [(block.qkv, 0.02), (block.proj, residual), (block.up, 0.02), (block.down, residual)]:
                nn.init.normal_(linear.weight, 0.0, std)
                nn.init.zeros_(linear.bias)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.size(1)))
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)


def fully_shard_units(args, model, world):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    if args.replicate > 1:
        shape, names = (args.replicate, world // args.replicate), ("replicate", "shard")
    else:
        shape, names = (world,), ("shard",)
    options = {"mesh": init_device_mesh("cpu", shape, mesh_dim_names=names)}
    if args.case == "bf16":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    elif args.case == "offload":
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)  # Pinning asks for an accelerator's driver.
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def wrap(args, model, world):
    """The same units everywhere: each block one, and the rest."""
    if args.mode == "fsdp2":
        return fully_shard_units(args, model, world)
    if args.mode == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        return FullyShardedDataParallel(
            model, auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=torch.device("cpu"), use_orig_params=True
        )
    if args.mode == "ddp":
        return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    return model


class Contender:
    """Model and optimizer under one strategy."""

    def __init__(self, args, world, shape):
        torch.manual_seed(0)
        model = make_subject(args.case, Gpt(**shape))
        self.num_parameters = sum(p.numel() for p in model.parameters())
        self.num_trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
        self.vocabulary = shape["vocabulary"]
        self.micro_batches = args.micro_batches
        self.switches_sync = args.mode == "fsdp2" and args.micro_batches > 1
        self.low_precision = LowPrecisionFloor(model) if args.mode == "floor" and args.case == "bf16" else None
        self.model = model if self.low_precision else wrap(args, model, world)
        trained = self.low_precision.masters if self.low_precision else self.model.parameters()
        self.optimizer = torch.optim.AdamW(
            [p for p in trained if p.requires_grad],
            lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, fused=args.optimizer == "fused",
        )  # fmt: skip

    def loss(self, x, y):
        return F.cross_entropy(self.model(x).float().view(-1, self.vocabulary), y.view(-1))

    def update(self):
        if self.low_precision:
            self.low_precision.update(self.optimizer)
        else:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def step(self, x, y):
        if self.micro_batches == 1:
            loss = self.loss(x, y)
            loss.backward()
            self.update()
            return loss.detach()
        total = 0.0
        for i, (tokens, targets) in enumerate(zip(x.chunk(self.micro_batches), y.chunk(self.micro_batches))):
            if self.switches_sync:
                self.model.set_requires_gradient_sync(i + 1 == self.micro_batches)
            loss = self.loss(tokens, targets) / self.micro_batches
            loss.backward()
            total = total + loss.detach()
        self.update()
        return total


def trim():
    ctypes.CDLL("libc.so.6").malloc_trim(0)


def status_kb(field):
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith(field + ":"):
                return int(line.split()[1])
    raise RuntimeError("no " + field + " in /proc/self/status")


def reset_peak():
    with open("/proc/self/clear_refs", "w") as refs:
        refs.write("5")


def cpu_seconds():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def say(**message):
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mode", choices=["fsdp2", "fsdp1", "ddp", "floor"], required=True)
    parser.add_argument("--case", choices=["plain", "bf16", "checkpointing", "offload", "lora"], default="plain")
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--replicate", type=int, default=1, help="copies of the model: hybrid sharding")
    parser.add_argument("--optimizer", choices=["stock", "fused"], default="fused")
    for name in ["vocabulary", "context", "dim", "heads", "layers", "batch", "length"]:
        parser.add_argument("--" + name, type=int, required=True)
    args = parser.parse_args()
    if args.mode not in ("fsdp2", "floor") and (args.case != "plain" or args.micro_batches > 1 or args.replicate > 1):
        parser.error(f"{args.mode} is here for plain training only")

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    if args.mode != "floor":
        dist.init_process_group("gloo")

    # One step of a tiny model first: it loads the libraries and starts the threads that the process has anyway.
    tiny = Contender(args, world, dict(vocabulary=64, context=16, dim=16, heads=1, layers=2))
    x = torch.randint(64, (args.micro_batches, 16))
    tiny.step(x, x.roll(1, 1))
    del tiny, x
    trim()
    idle_kb = status_kb("VmRSS")

    shape = {name: getattr(args, name) for name in ["vocabulary", "context", "dim", "heads", "layers"]}
    contender = Contender(args, world, shape)
    trim()
    say(
        event="ready",
        idle_kb=idle_kb,
        parameters=contender.num_parameters,
        trainable=contender.num_trainable,
        torch=torch.__version__,
    )

    torch.manual_seed(100 + rank)
    for line in sys.stdin:
        command = line.split()
        if command[0] == "quit":
            break
        times, losses = [], []
        reset_peak()
        cpu = cpu_seconds()
        for _ in range(int(command[1])):
            x = torch.randint(args.vocabulary, (args.batch * args.micro_batches, args.length))
            y = x.roll(1, 1)
            begin = time.monotonic()
            loss = contender.step(x, y)
            times.append(time.monotonic() - begin)
            losses.append(loss.item())
        cpu = cpu_seconds() - cpu
        say(event="ran", times=times, losses=losses, cpu=cpu, peak_kb=status_kb("VmHWM"), rss_kb=status_kb("VmRSS"))
    sys.stdout.flush()
    # Interpreter and process group take their time to come down, and nothing is left to be saved.
    os._exit(0)


if __name__ == "__main__":
    main()
