"""The chips that are compiled for: one of each compute capability.

XLA asks for a device's limits, to size tiles and refuse launches, and for its compute capability, to pick instructions.
Limits are those of NVIDIA's CUDA programming guide (table of technical specifications per compute capability), the rest
is from data sheets.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.roofline import CHIPS, Chip

__all__ = ["TARGETS", "Target"]

_REGISTERS = 65536  # per multiprocessor, of every chip here
_REGISTER_UNIT = 256  # registers are given to warps in units of this
_SCHEDULERS = 4  # each has a quarter of the registers, and of a block's warps
_RESERVED_SHARED = 1024  # bytes that the system takes of every block's shared memory

_PROTO = """\
gpu_device_info {{
  name: "{device}"
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {features} }}
  core_count: {num_sms} fpus_per_core: 128 clock_rate_ghz: {clock_ghz}
  memory_bandwidth: {bandwidth} device_memory_size: {memory} l2_cache_size: {l2_bytes}
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: {threads_per_sm}
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: {registers} registers_per_block_limit: {registers}
  shared_memory_per_block: 49152 shared_memory_per_block_optin: {shared_per_block}
  shared_memory_per_core: {shared_per_sm}
  driver_version: "{cuda}" runtime_version: "{cuda}" compile_time_toolkit_version: "{cuda}"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{device}"
"""


@dataclass(frozen=True, slots=True)
class Target:
    """A chip to compile for.

    Attributes:
        name: what it is called here: its compute capability.
        device: its name, as a driver gives it.
        chip: its memory and speed.
        major, minor: compute capability.
        num_sms: multiprocessors.
        shared_per_sm, shared_per_block: most bytes of shared memory.
        threads_per_sm: most resident threads.
        blocks_per_sm: most resident blocks.
        l2_bytes: of the second-level cache.
        clock_ghz: highest clock.
    """

    name: str
    device: str
    chip: Chip
    major: int
    minor: int
    num_sms: int
    shared_per_sm: int
    shared_per_block: int
    threads_per_sm: int
    blocks_per_sm: int
    l2_bytes: int
    clock_ghz: float

    @property
    def capability(self) -> int:
        """Compute capability, 90 for 9.0."""
        return 10 * self.major + self.minor

    @property
    def arch(self) -> str:
        """As assemblers name it; from 9.0 on with the instructions of this very chip (wgmma, setmaxnreg)."""
        return self.name + ("a" if self.major >= 9 else "")

    def proto(self, cuda: str) -> str:
        """The text of XLA's GpuTargetConfigProto, for a driver and a toolkit of version ``cuda``."""
        return _PROTO.format(
            device=self.device,
            major=self.major,
            minor=self.minor,
            features="ACCELERATED_FEATURES" if self.arch.endswith("a") else "NONE",
            num_sms=self.num_sms,
            clock_ghz=self.clock_ghz,
            bandwidth=int(self.chip.bandwidth),
            memory=self.chip.memory,
            l2_bytes=self.l2_bytes,
            threads_per_sm=self.threads_per_sm,
            registers=_REGISTERS,
            shared_per_block=self.shared_per_block,
            shared_per_sm=self.shared_per_sm,
            cuda=cuda,
        )

    def resident_blocks(self, threads: int, registers: int, shared: int) -> int:
        """Blocks that run on a multiprocessor at once: of ``threads``, each with ``registers``, of ``shared`` bytes."""
        warps = -(-threads // 32)
        per_warp = -(-registers * 32 // _REGISTER_UNIT) * _REGISTER_UNIT
        warps_by_registers = _REGISTERS // _SCHEDULERS // per_warp * _SCHEDULERS
        return min(
            self.blocks_per_sm,
            self.threads_per_sm // (32 * warps),
            warps_by_registers // warps,
            self.shared_per_sm // (shared + _RESERVED_SHARED),
        )


_KIB = 1024
TARGETS = {
    target.name: target
    for target in (
        Target(
            "sm_80", "NVIDIA A100-SXM4-80GB", CHIPS["a100"], 8, 0, 108, 164 * _KIB, 163 * _KIB, 2048, 32, 40 << 20, 1.41
        ),
        Target("sm_89", "NVIDIA L4", CHIPS["l4"], 8, 9, 58, 100 * _KIB, 99 * _KIB, 1536, 24, 48 << 20, 2.04),
        Target("sm_90", "NVIDIA H200", CHIPS["h200"], 9, 0, 132, 228 * _KIB, 227 * _KIB, 2048, 32, 50 << 20, 1.98),
    )
}
