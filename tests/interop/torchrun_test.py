"""torchrun starts ebb's ranks, and they compute what the ranks of --nproc compute."""
import pathlib
import sys
import tempfile

from common import SIZES, train

torchrun = [str(pathlib.Path(sys.executable).parent / "torchrun"), "--no-python", "--nproc-per-node", "2",
            "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
with tempfile.TemporaryDirectory() as folder:
    by_torchrun, _ = train(folder, *SIZES, launcher=torchrun)
with tempfile.TemporaryDirectory() as folder:
    by_nproc, _ = train(folder, *SIZES, "--nproc", "2")
assert by_torchrun["world_size"] == by_nproc["world_size"] == 2, (by_torchrun, by_nproc)
for key in ("train_loss", "eval_loss", "parameters", "sample"):
    assert by_torchrun[key] == by_nproc[key], (key, by_torchrun[key], by_nproc[key])
print("equal losses:", by_nproc["train_loss"], by_nproc["eval_loss"])
