"""A pipeline schedule with two micro-batches in flight for each stage, where 1F1B has one.

    torchrun --nproc-per-node 2 launch.py bench throughput -pp 2 --plugin examples/plugins/two_per_stage.py \
        --pipeline-schedule two_per_stage

While one micro-batch of a stage is on its way to the next stage, the other one computes, so slow links between hosts are hidden. Each
micro-batch has half the sequences, so a stage reads its weights twice as often: where a step takes nearly as long for few sequences as
for many, 1F1B is faster. Compare both with the same requests, in alternating rounds:

    mpirun -n 2 python benchmarks/pipeline_schedules.py --model DIR --plugin examples/plugins/two_per_stage.py

The batch policy ``auto`` asks the schedule for ``has_steady_state``, not for its name: both get the same one.
"""

from labinfer import register
from labinfer.engine.pipeline_schedule import PipelineSchedule

PER_STAGE = 2


@register("pipeline_schedule", "two_per_stage")
class TwoPerStage(PipelineSchedule):
    has_steady_state = True

    def num_micro_batches(self, target):
        return PER_STAGE * target

    def may_launch(self, in_flight, target):
        return in_flight < PER_STAGE * target
