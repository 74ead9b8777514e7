"""Every number the plan takes from outside: devices, rates, overheads, faults. Each says where it comes from."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

Kind = Literal["measured", "fitted", "data sheet", "published", "assumed"]
GIB = float(1 << 30)
GB, TB, TFLOPS = 1e9, 1e12, 1e12


class Figure(float):
    """A number with its origin: `kind` says how sure it is, `source` where it was taken from."""

    kind: Kind
    source: str

    def __new__(cls, value: float, kind: Kind, source: str) -> Figure:
        figure = super().__new__(cls, value)
        figure.kind, figure.source = kind, source
        return figure


@dataclass(frozen=True, slots=True)
class Chip:
    """What memory depends on: a device's name, its bytes, and the bytes of a number in the compute precision."""

    name: str
    memory: float
    number_bytes: int = field(default=2, kw_only=True)

    @property
    def is_gpu(self) -> bool:
        return self.name != "cpu"

    @property
    def is_half_gpu(self) -> bool:
        """Whether the GPU's own kernels of attention and of the output head run, which take half precision."""
        return self.is_gpu and self.number_bytes < 4


@dataclass(frozen=True, slots=True)
class Device(Chip):
    """One accelerator and how it is connected. Bytes and operations per second, links in one direction."""

    bandwidth: float
    bf16: float  # dense matrix products, as the data sheet says
    float32: float  # without tensor cores
    link: float  # to the other devices of its machine
    network: float  # to other machines, a device
    per_machine: int
    source: str

    @property
    def matmul(self) -> float:
        """Operations a second of a large matrix product in the compute precision, as reached and not as sold."""
        return MEASURED_MATMUL.get(self.name) or self.bf16 * MATMUL_SHARE

    @property
    def reached_bandwidth(self) -> float:
        return self.bandwidth * BANDWIDTH_SHARE

    @property
    def head_rate(self) -> float:
        """Operations per second of the output head: half-precision products summed in float32, or float32 throughout."""
        return self.matmul if self.is_half_gpu else self.float32 * FLOAT32_SHARE

    @property
    def attention_rate(self) -> float:
        """Operations a second of training's attention, whose kernel is the same compiled or not."""
        return self.matmul * (ATTENTION_SHARE if self.is_gpu else TRAIN_SHARE_CPU)

    @property
    def train_share(self) -> float:
        """What training as a whole reaches of the rates above."""
        return TRAIN_SHARE if self.is_gpu else TRAIN_SHARE_CPU

    @property
    def row_layer_s(self) -> float:
        return ROW_LAYER_S if self.is_gpu else 0.0

    @property
    def decode_layer_s(self) -> float:
        return DECODE_LAYER_S if self.is_gpu else DECODE_LAYER_CPU_S

    @property
    def eager_layer_s(self) -> float:
        return EAGER_LAYER_S if self.is_gpu else DECODE_LAYER_CPU_S


def in_float32(device: Device) -> Device:
    """The device when the model computes in float32."""
    if device.number_bytes == 4:
        return device
    return replace(device, name=f"{device.name}-float32", bf16=device.float32, number_bytes=4)


_SHEET = "NVIDIA data sheet, dense rates; not measured here"
DEVICES: dict[str, Device] = {
    d.name: d
    for d in (
        Device("b200", 180 * GB, 7.7 * TB, 2250 * TFLOPS, 75 * TFLOPS, 900 * GB, 50 * GB, 8, f"HGX B200, {_SHEET}"),
        Device("h200", 141 * GB, 4.8 * TB, 989 * TFLOPS, 67 * TFLOPS, 450 * GB, 50 * GB, 8, f"H200 SXM, {_SHEET}"),
        Device("h100", 80 * GB, 3.35 * TB, 989 * TFLOPS, 67 * TFLOPS, 450 * GB, 50 * GB, 8, f"H100 SXM, {_SHEET}"),
        Device("a100", 80 * GB, 2.039 * TB, 312 * TFLOPS, 19.5 * TFLOPS, 300 * GB, 25 * GB, 8, f"A100 SXM 80 GB, {_SHEET}"),
        Device("l40s", 48 * GB, 0.864 * TB, 362 * TFLOPS, 91.6 * TFLOPS, 32 * GB, 12.5 * GB, 8, f"L40S, PCIe 4, {_SHEET}"),
        Device("rtx4090", 24 * GB, 1.008 * TB, 165 * TFLOPS, 82.6 * TFLOPS, 32 * GB, 3 * GB, 8, f"RTX 4090, PCIe 4, {_SHEET}"),
        Device("mi300x", 192 * GB, 5.3 * TB, 1307 * TFLOPS, 163 * TFLOPS, 448 * GB, 50 * GB, 8, "AMD data sheet, dense rates; not measured here"),
        Device("cpu", 24 * GIB, 20 * GB, 0.26 * TFLOPS, 0.26 * TFLOPS, 5 * GB, 1 * GB, 1, "2 cores at 2.8 GHz as in docs/performance.md: 65 billion multiply-adds a second and core, measured; bandwidth assumed", number_bytes=4),
    )
}  # fmt: skip

# Rates
MEASURED_MATMUL: dict[str, Figure] = {
    "h200": Figure(790 * TFLOPS, "measured", "best bf16 matrix product seen on one H200"),
    "cpu": Figure(
        0.26 * TFLOPS, "measured", "docs/performance.md, Floor: 65 billion multiply-adds a second, 2 cores"
    ),
}
MATMUL_SHARE = Figure(0.80, "assumed", "the H200's 790 of 989, taken over to devices that were not measured")
BANDWIDTH_SHARE = Figure(
    0.85, "assumed", "share of the data sheet's bandwidth that a streaming kernel reaches"
)
FLOAT32_SHARE = Figure(
    0.80, "assumed", "share of the float32 rate in an output head that is not fused, as for bf16"
)
COLLECTIVE_SHARE = Figure(0.70, "assumed", "share of link and network bandwidth in large collectives")
HOP_S = Figure(10e-6, "assumed", "latency a machine in a ring of NCCL, and of one exchange inside a machine")
OVERLAP = Figure(0.70, "assumed", "share of computing behind which FSDP's exchange can hide")

# Decoding
DECODE_LAYER_S = Figure(
    37.8e-6,
    "fitted",
    "time a layer and decode step that does not grow with the batch: docs/performance.md, On a GPU, rollout of smol, "
    "143,300 tok/s at batch 256 and 288,900 at 1,024",
)
SAMPLING_PASSES = Figure(
    8.4,
    "fitted",
    "passes over a row's float32 logits: with ROW_LAYER_S and DECODE_LAYER_S from three points, rollout of smol at batch "
    "256 and 1,024 and of qwen1.5b at 256 (0.41 s); as many constants as points",
)
EAGER_LAYER_S = Figure(
    0.9e-3,
    "measured",
    "docs/performance.md, On a GPU, before CUDA graphs: 4.11 s / 128 / 30 and 2.58 s / 128 / 28",
)
DECODE_LAYER_CPU_S = Figure(1.8e-3, "fitted", "generation of `make train` on 2 idle cores, 1.2 s a step")
ROW_PASSES = Figure(
    3,
    "assumed",
    "passes over a row's intermediate results in decoding; the three points do not tell it apart",
)
ROW_LAYER_S = Figure(
    24.0e-9,
    "fitted",
    "time a row, layer and decode step that neither bytes nor operations account for; see SAMPLING_PASSES",
)

# TrainingPart
TRAIN_SHARE = Figure(
    0.65,
    "fitted",
    "of the rates, all but attention, with nothing compiled; docs/performance.md, On a GPU: training of qwen1.5b on 8 × "
    "8,192 tokens (3.07 s), and of qwen1.5b and smol eager and padded (4.09 and 0.84 s)",
)
COMPILED_TRAIN_SHARE = Figure(
    1.0,
    "fitted",
    "as TRAIN_SHARE, compiled: docs/performance.md, On a GPU, training of qwen1.5b (0.977 s) and of 8 × 8,192 tokens "
    "(2.38 s). Products reach less, 0.5 of 0.58 s in a profile; fusion saves passes over memory that TRAFFIC_PASSES counts",
)
ATTENTION_SHARE = Figure(
    0.5,
    "fitted",
    "of the matrix products' rate that attention reaches in training, its backward counted as two forwards: "
    "docs/performance.md, On a GPU, training of qwen1.5b on 8 × 8,192 and, offloaded, 2 × 32,768 tokens (2.38 and 4.55 s)",
)
TRAIN_SHARE_CPU = Figure(0.37, "fitted", "update of `make train` on 2 idle cores, 0.72 s a step")
TRAFFIC_PASSES = Figure(2.5, "assumed", "passes over what a layer keeps for its backward, a forward")
LOGIT_PASSES = Figure(4, "assumed", "passes over float32 logits, a forward of the head")
KERNELS_LAYER = Figure(35, "assumed", "kernels a layer's forward launches in transformers")
KERNEL_S = Figure(8e-6, "assumed", "seconds a launched kernel from Python")
CAPTURED_SHARE = Figure(
    0.32,
    "fitted",
    "what is left of starting kernels when forward and backward are captured, 4 µs of the device each: with "
    "COMPILED_TRAIN_SHARE between training of smol (0.221 s, still under) and of qwen1.5b (0.977 and, in another run, "
    "0.912 s). Scoring of 64 short sequences, 14 ms against 131, asks for less",
)
OPTIMIZER_BYTES = Figure(
    30, "assumed", "bytes read and written a parameter: gradient, master, two moments, bf16 copy"
)
OFFLOAD_COPY = Figure(
    32 * GB,
    "fitted",
    "bytes a second each way, both at once, of masters and moments kept in pinned host memory: docs/performance.md, On a "
    "GPU, 8 × 8,192 tokens of qwen1.5b with optimizer_offload (2.95 s against 2.38)",
)

# Publication and checkpoints
HOST_COPY = Figure(20 * GB, "assumed", "bytes a second between a device and its machine's memory")
STORAGE_MACHINE = Figure(
    2 * GB, "assumed", "bytes a second one machine writes to shared storage, synced and hashed"
)
STORAGE_TOTAL = Figure(100 * GB, "assumed", "bytes a second the shared storage takes from all machines")

# Memory
RESERVED = Figure(2 * GIB, "assumed", "CUDA context, NCCL buffers and libraries, a GPU")
FRAGMENTATION = Figure(1.05, "assumed", "what the allocator holds over what is in use")
LOGIT_COPIES = Figure(
    4, "assumed", "of a chunk of an unfused head: logits, log-softmax, its gradient and that of the logits"
)
DECODE_LOGIT_COPIES = Figure(
    2,
    "fitted",
    "of the float32 logits of a decode step, in its CUDA graph and from warming it up: docs/performance.md, On a GPU, "
    "rollout of smol, 128 × 8 (5.0 GiB)",
)
COMPILED_KEPT = Figure(
    0.6,
    "fitted",
    "of what an eager layer keeps for its backward that a compiled one keeps on a GPU: docs/performance.md, On a GPU, "
    "peaks of smol and qwen1.5b with 8,500 tokens a micro-batch, the larger of what the two ask for",
)

# Faults
MTBF_DEVICE_S = Figure(
    54 * 86400 * 16384 / 419,
    "published",
    "arXiv 2407.21783, 3.3.4: 419 unexpected interruptions in 54 days on 16,384 GPUs",
)
WORKER_RESTART_S = Figure(120, "assumed", "a rollout worker is replaced and has its weights")
TRAINER_RESTART_S = Figure(300, "assumed", "all ranks start again and read the checkpoint")
STRAGGLER_SIGMA = Figure(0.05, "assumed", "spread of log speed over devices")
SLOW_SHARE = Figure(0.01, "assumed", "share of devices that are slow for good")
SLOW_FACTOR = Figure(2.0, "assumed", "how much slower those are")

# Work
MEAN_SHARE = Figure(0.35, "assumed", "mean answer as a share of the longest, where it is not given")
KEEP_RATE = Figure(
    0.5, "assumed", "share of groups with a gradient under dynamic sampling, where it is not given"
)
LENGTH_SPREAD = Figure(
    0.8, "assumed", "standard deviation of the length over its mean, before the cut at the longest"
)
