"""What ebb and FSDP2 do besides plain training; bench_fsdp.cpp and peers.py take the same options for it."""
import dataclasses


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    what: str  # What is compared.
    world: int = 2
    kind: str = "plain"  # --case
    micro_batches: int = 1
    replicate: int = 1  # Copies of the model.
    loss_tolerance: float = 2e-5  # See fsdp/run.
    size: tuple = (2, 128)  # Of a micro-batch.

    def options(self, mode):
        options = ["--case", self.kind, "--micro-batches", str(self.micro_batches)]
        return options if mode == "floor" else options + ["--replicate", str(self.replicate)]


CASES = {
    case.name: case
    for case in [
        Case("hybrid", "a 2 x 2 mesh: 2 copies of the model, each sharded over 2 ranks", world=4, replicate=2),
        Case(
            "bf16",
            "bfloat16 parameters, activations and gathers, norms too; float32 shards, reductions and optimizer "
            "(MixedPrecisionPolicy(param_dtype=bfloat16, reduce_dtype=float32)); the floors copy their float32 parameters to "
            "bfloat16 ones each step. 1 x 16 tokens: without instructions for it, bfloat16 products take tens of times as long "
            "as float32 ones, on all sides",
            kind="bf16",
            size=(1, 16),
            # C++ rounds a linear layer's product to bfloat16 before it adds the bias, Python after.
            loss_tolerance=5e-4,
        ),
        Case(
            "accumulation",
            "2 micro-batches a step, gradients reduced after the last alone (no_sync; set_requires_gradient_sync)",
            micro_batches=2,
        ),
        Case(
            "checkpointing",
            "activations of every block recomputed in backward (ebb::checkpoint; torch.utils.checkpoint, not reentrant), by the "
            "floors too",
            kind="checkpointing",
        ),
        Case(
            "offload",
            "ebb: shards, gradients and optimizer state in a memory-mapped file, copied to and fro; FSDP2: CPUOffloadPolicy("
            "pin_memory=False), which for a model on the CPU leaves everything where it is. The floors do not offload. Memory "
            "counts the file's pages as long as the kernel keeps them, so that it does not show what a file saves when memory "
            "is short",
            kind="offload",
        ),
        Case("lora", "rank 8 adapters on all linear layers of the blocks, everything else frozen", kind="lora"),
    ]
}
