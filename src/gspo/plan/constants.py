"""Every number that the planner does not compute: devices, rates, overheads, failures. Each with its source."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

Kind = Literal["measured", "fitted", "data sheet", "published", "assumed"]
GIB = float(1 << 30)
GB, TB, TFLOPS = 1e9, 1e12, 1e12


class Constant(float):
    """A number with its origin: `kind` says how reliable it is, `source` where it comes from."""

    kind: Kind
    source: str

    def __new__(cls, kind: Kind, value: float, source: str) -> Constant:
        constant = super().__new__(cls, value)
        constant.kind, constant.source = kind, source
        return constant


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
    bf16: float  # dense matrix products, by the data sheet
    float32: float  # without tensor cores
    link: float  # to the other devices of its machine
    network: float  # to other machines, per device
    per_machine: int
    source: str

    @property
    def matmul(self) -> float:
        """Operations per second that a large matrix product reaches in the compute precision."""
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
        """Operations per second of attention in training; its kernel is the same whether layers are compiled or not."""
        return self.matmul * (ATTENTION_SHARE if self.is_gpu else TRAIN_SHARE_CPU)

    @property
    def train_share(self) -> float:
        """Share of the rates above that training as a whole reaches."""
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
    """The device when a model computes in float32."""
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
        Device("cpu", 24 * GIB, 20 * GB, 0.26 * TFLOPS, 0.26 * TFLOPS, 5 * GB, 1 * GB, 1, "2 cores at 2.8 GHz as in docs/performance.md: 65 billion multiply-adds per second and core, measured; bandwidth assumed", number_bytes=4),
    )
}  # fmt: skip

measured, fitted, published, assumed = (
    partial(Constant, kind) for kind in ("measured", "fitted", "published", "assumed")
)

# Rates
MEASURED_MATMUL: dict[str, Constant] = {
    "h200": measured(790 * TFLOPS, "best bf16 matrix product seen on one H200"),
    "cpu": measured(0.26 * TFLOPS, "docs/performance.md, Floor: 65 billion multiply-adds per second and core, 2 cores"),
}
MATMUL_SHARE = assumed(0.80, "790 of 989 as measured on an H200, assumed for devices that were not measured")
BANDWIDTH_SHARE = assumed(0.85, "share of the bandwidth in the data sheet that a streaming kernel reaches")
FLOAT32_SHARE = assumed(0.80, "share of the float32 rate that an output head in float32 reaches, as for bf16")
COLLECTIVE_SHARE = assumed(0.70, "share of link and network bandwidth in large collectives")
HOP_S = assumed(10e-6, "latency per machine in an NCCL ring, and per exchange inside a machine")
OVERLAP = assumed(0.70, "share of the computation that can overlap with FSDP communication")

# Decoding
_ROLLOUTS = "smol at batch 256 (0.195 s for 128 tokens) and 1,024 (331,700 tok/s) and qwen 0.5B at 1,024 (267,900)"
DECODE_LAYER_S = fitted(
    34.6e-6,
    "time per layer and decode step that does not grow with the batch: docs/performance.md, Real work and On a GPU, "
    f"rollout of {_ROLLOUTS}; qwen1.5b at 256 (0.40 s) is predicted 12 % low",
)
SAMPLING_PASSES = fitted(
    2.4,
    f"passes over the float32 logits of a row: fitted with DECODE_LAYER_S and ROW_LAYER_S to the rollout of {_ROLLOUTS}",
)
EAGER_LAYER_S = measured(
    0.9e-3, "docs/performance.md, On a GPU, before CUDA graphs: 4.11 s / 128 / 30 and 2.58 s / 128 / 28"
)
DECODE_LAYER_CPU_S = fitted(1.8e-3, "generation of `make train` on 2 idle cores, 1.2 s per step")
ROW_PASSES = assumed(
    3, "passes over the intermediate results of a row in decoding; the three points do not determine it"
)
ROW_LAYER_S = fitted(
    9.7e-9, "time per row, layer and decode step that neither bytes nor operations explain; see SAMPLING_PASSES"
)
WAITING_SHARE = measured(
    0.08, "share of a rollout in which the GPU waits for the host: docs/performance.md, Real work, 0.17 of 2.06 s"
)

# Training
TRAIN_SHARE = fitted(
    0.65,
    "share of the rates that training reaches uncompiled, without attention; docs/performance.md, On a GPU: training of qwen1.5b on 8 × "
    "8,192 tokens (3.07 s), and of qwen1.5b and smol eager and padded (4.09 and 0.84 s)",
)
COMPILED_TRAIN_SHARE = fitted(
    1.0,
    "as TRAIN_SHARE, but compiled: docs/performance.md, On a GPU, training of qwen1.5b (0.977 s) and of 8 × 8,192 tokens "
    "(2.38 s). Matrix products alone reach less, 0.5 of 0.58 s in a profile; fusion saves memory passes that TRAFFIC_PASSES "
    "counts",
)
ATTENTION_SHARE = fitted(
    0.5,
    "share of the rate of matrix products that attention reaches in training, its backward counted as two forwards: "
    "docs/performance.md, On a GPU, training of qwen1.5b on 8 × 8,192 and, offloaded, 2 × 32,768 tokens (2.38 and 4.55 s)",
)
TRAIN_SHARE_CPU = fitted(0.37, "update of `make train` on 2 idle cores, 0.72 s per step")
TRAFFIC_PASSES = assumed(
    2.5,
    "passes per forward over what a layer keeps for its backward, in training and prefill: docs/performance.md, Real work, "
    "prefill of about 190,000 tokens of Qwen 0.5B, 0.37 s, is predicted as 0.34",
)
LOGIT_PASSES = assumed(4, "passes per forward over float32 logits")
KERNELS_LAYER = assumed(35, "kernels that the forward of a layer launches in transformers")
KERNEL_S = assumed(8e-6, "seconds per kernel launched from Python")
CAPTURED_SHARE = fitted(
    0.32,
    "share of the launch time that remains when forward and backward are captured: fitted together with "
    "COMPILED_TRAIN_SHARE to training of smol (0.221 s, predicted slightly low) and of qwen1.5b (0.977 s, in another run "
    "0.912 s). Scoring of 64 short sequences, 14 ms against 131, suggests less",
)
OPTIMIZER_BYTES = assumed(30, "bytes read and written per parameter: gradient, master, two moments, bf16 copy")
OFFLOAD_COPY = fitted(
    32 * GB,
    "bytes per second in each direction, both at once, of masters and moments in pinned host memory: docs/performance.md, On a "
    "GPU, 8 × 8,192 tokens of qwen1.5b with optimizer_offload (2.95 s against 2.38)",
)

# Publication and checkpoints
HOST_COPY = assumed(20 * GB, "bytes per second between a device and host memory")
STORAGE_MACHINE = assumed(2 * GB, "bytes per second that one machine writes to shared storage, synced and hashed")
STORAGE_TOTAL = assumed(100 * GB, "bytes per second that the shared storage takes from all machines together")

# Memory
RESERVED = assumed(2 * GIB, "CUDA context, NCCL buffers and libraries, per GPU")
FRAGMENTATION = assumed(1.05, "what the allocator holds, relative to what is in use")
LOGIT_COPIES = assumed(
    4, "copies of a chunk of logits alive at once in an unfused head: logits, log-softmax and their gradients"
)
DECODE_LOGIT_COPIES = fitted(
    2,
    "copies of the float32 logits of a decode step, in its CUDA graph and from warming it up: docs/performance.md, On a GPU, "
    "rollout of smol, 128 × 8 (5.0 GiB)",
)
COMPILED_KEPT = fitted(
    0.6,
    "what a compiled layer keeps for its backward on a GPU, relative to an eager one: docs/performance.md, On a GPU, peaks "
    "of smol and qwen1.5b with 8,500 tokens per micro-batch, the larger of the two values",
)

# Failures
MTBF_DEVICE_S = published(
    54 * 86400 * 16384 / 419, "arXiv 2407.21783, 3.3.4: 419 unexpected interruptions in 54 days on 16,384 GPUs"
)
WORKER_RESTART_S = assumed(120, "until a failed rollout worker is replaced and has its weights")
TRAINER_RESTART_S = assumed(300, "until all ranks have restarted and read the checkpoint")
STRAGGLER_SIGMA = assumed(0.05, "standard deviation of log speed over devices")
SLOW_SHARE = assumed(0.01, "share of devices that are permanently slow")
SLOW_FACTOR = assumed(2.0, "how many times slower those are")

# Work
MEAN_SHARE = assumed(0.35, "mean response length as a share of the longest, unless given")
KEEP_RATE = assumed(0.5, "share of groups that dynamic sampling keeps, unless given")
LENGTH_SPREAD = assumed(
    0.8, "standard deviation of response lengths relative to their mean, before the cut at the longest"
)
