"""One rank of a PyTorch peer of the largest-model benchmark: FSDP2, DDP, or a plain model built directly.

bench_largest.cpp is its C++ counterpart. FSDP2 and DDP build the model on the meta device; its values are then drawn as
the constructor would have drawn them, one parameter at a time, so that all systems start from the same weights.
"""
import argparse
import contextlib
import errno
import json
import math
import os
import pathlib
import sys
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
sys.dont_write_bytecode = True

from fsdp.peers import Block, Gpt, say, status_kb  # noqa: E402

KEEP_ACTIVATIONS = False


class CheckpointedBlock(Block):
    """FSDP's hooks are around the checkpoint, as its documentation has it."""

    def forward(self, x):
        if KEEP_ACTIVATIONS:
            return super().forward(x)
        return checkpoint(super().forward, x, use_reentrant=False)


def build(shape):
    model = Gpt(**shape)
    for block in model.blocks:
        block.__class__ = CheckpointedBlock
    return model


@torch.no_grad()
def draw_values(model, layers):
    """What Gpt's constructor does to its parameters, in the same order: first what each layer's own constructor draws,
    then the model's initialisation on top. At most one whole parameter is in memory."""

    def put(parameter, initialise):
        whole = torch.empty(parameter.shape)
        initialise(whole)
        if parameter.is_meta:
            raise RuntimeError("a parameter is still on the meta device")
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        if local is not parameter:
            rank, world = dist.get_rank(), dist.get_world_size()
            rows = -(-whole.size(0) // world)  # as torch.chunk
            whole = whole[rows * rank : rows * (rank + 1)]
        local.copy_(whole)

    def embedding(module):
        put(module.weight, nn.init.normal_)

    def layer_norm(module):
        put(module.weight, nn.init.ones_)
        put(module.bias, nn.init.zeros_)

    def linear(module):
        put(module.weight, lambda w: nn.init.kaiming_uniform_(w, a=math.sqrt(5)))
        bound = 1 / math.sqrt(module.in_features)
        put(module.bias, lambda b: nn.init.uniform_(b, -bound, bound))

    embedding(model.tokens)
    embedding(model.positions)
    for block in model.blocks:
        layer_norm(block.norm1)
        layer_norm(block.norm2)
        for module in [block.qkv, block.proj, block.up, block.down]:
            linear(module)
    layer_norm(model.norm)

    residual = 0.02 / math.sqrt(2.0 * layers)
    put(model.tokens.weight, lambda w: nn.init.normal_(w, 0.0, 0.02))
    put(model.positions.weight, lambda w: nn.init.normal_(w, 0.0, 0.02))
    for block in model.blocks:
        for module, std in [(block.qkv, 0.02), (block.proj, residual), (block.up, 0.02), (block.down, residual)]:
            put(module.weight, lambda w, std=std: nn.init.normal_(w, 0.0, std))
            put(module.bias, nn.init.zeros_)


def set_up(mode, world, shape):
    torch.manual_seed(0)
    if mode == "plain":
        return build(shape)
    with torch.device("meta"):
        model = build(shape)
    if mode == "ddp":
        model.to_empty(device="cpu")
        draw_values(model, shape["layers"])
        return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (world,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    draw_values(model, shape["layers"])
    return model


def make_update(mode, parameters):
    options = dict(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, fused=True)
    if mode != "fsdp2_in_backward":
        optimizer = torch.optim.AdamW(parameters, **options)

        def update():
            optimizer.step()
            optimizer.zero_grad()

        return update

    optimizers = {parameter: torch.optim.AdamW([parameter], **options) for parameter in parameters}

    def step(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(step)
    return lambda: None


def train(args):
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    if args.mode != "plain":
        dist.init_process_group("gloo")
    idle_kb = status_kb("RssAnon")
    shape = dict(vocabulary=args.vocabulary, context=args.length, dim=args.dim, heads=args.heads, layers=args.layers)
    model = set_up(args.mode, world, shape)
    parameters = list(model.parameters())
    update = make_update(args.mode, parameters)
    say(
        event="ready",
        parameters=sum(p.numel() for p in parameters),
        idle_kb=idle_kb,
        rss_kb=status_kb("VmRSS"),
        torch=torch.__version__,
    )

    torch.manual_seed(100 + rank)
    x = torch.randint(args.vocabulary, (1, args.length))
    y = x.roll(1, 1)
    for _ in range(args.steps):
        begin = time.monotonic()
        loss = F.cross_entropy(model(x).view(-1, args.vocabulary), y.view(-1))
        value = loss.item()
        loss.backward()
        backward_kb = status_kb("VmRSS")
        del loss
        update()
        say(
            event="step",
            loss=value,
            seconds=time.monotonic() - begin,
            after_backward_kb=backward_kb,
            rss_kb=status_kb("VmRSS"),
            peak_kb=status_kb("VmHWM"),
        )
    say(event="done", peak_kb=status_kb("VmHWM"))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mode", choices=["ddp", "fsdp2", "fsdp2_in_backward", "plain"], required=True)
    for name in ["vocabulary", "dim", "heads", "layers", "length", "steps"]:
        parser.add_argument("--" + name, type=int, required=True)
    args = parser.parse_args()
    global KEEP_ACTIVATIONS
    KEEP_ACTIVATIONS = args.mode == "plain"
    code = 0
    try:
        train(args)
    except (MemoryError, RuntimeError) as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        code = errno.ENOMEM if isinstance(error, MemoryError) or "t allocate memory" in str(error) else 1
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    # Interpreter and process group take their time to come down, and nothing is left to be saved.
    os._exit(code)


if __name__ == "__main__":
    main()
