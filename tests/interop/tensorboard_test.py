"""TensorBoard reads the curves that `ebb train` writes."""
import tempfile

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from common import SIZES, train

with tempfile.TemporaryDirectory() as folder:
    summary, _ = train(folder, *SIZES)
    events = EventAccumulator(folder)
    events.Reload()
    losses = events.Scalars("train/loss")
    assert [point.step for point in losses] == [1, 2, 3, 4], losses
    assert all(1.0 < point.value < 10.0 for point in losses), losses
    evaluation = events.Scalars("eval/loss")[-1]
    assert evaluation.step == 4, evaluation
    assert abs(evaluation.value - summary["eval_loss"]) < 1e-6 * summary["eval_loss"], (evaluation, summary["eval_loss"])
    print("TensorBoard read", sorted(events.Tags()["scalars"]))
