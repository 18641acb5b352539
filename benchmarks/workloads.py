"""What plans are judged on: a model of some sizes, a machine, and a memory limit."""

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

GIB = 2.0**30


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model on a machine.

    Attributes:
      model: a module of `models`.
      base: one of its sizes; `sizes` is what differs from it.
      target: as in `autoshard.aot`.
      memory_limit_bytes: per device; None: what the chip has.
    """

    name: str
    model: str
    base: str
    target: str
    sizes: dict[str, Any] = dataclasses.field(default_factory=dict)
    memory_limit_bytes: float | None = None

    def __str__(self) -> str:
        return f"{self.name} on {self.target}"

    @property
    def device_count(self) -> int:
        shape = self.target.partition(":")[2].partition("*")[0]
        count = self.slice_count
        for n in shape.split("x"):
            count *= int(n)
        return count

    @property
    def slice_count(self) -> int:
        return int(self.target.partition("*")[2] or 1)

    @property
    def meshes(self) -> tuple[str, ...]:
        """Three mesh shapes, from no second axis to a wide one; one of them has an axis of slices
        where there are any."""
        n = self.device_count
        wide = 4 if self.slice_count == 1 else n // self.slice_count
        return (f"data={n}", f"data={n // 2},model=2", f"data={n // wide},model={wide}")

    @property
    def batch(self) -> int:
        module = importlib.import_module(f"models.{self.model}")
        return dataclasses.replace(module.SIZES[self.base], **self.sizes).batch

    @property
    def step(self) -> Callable:
        module = importlib.import_module(f"models.{self.model}")
        return getattr(module, "serve_step", None) or module.train_step

    @property
    def donate_argnums(self) -> tuple[int, ...]:
        return importlib.import_module(f"models.{self.model}").donate_argnums

    def arguments(self) -> tuple:
        module = importlib.import_module(f"models.{self.model}")
        return module.example_arguments(dataclasses.replace(module.SIZES[self.base], **self.sizes))


_TABLES = (4_000_000, 2_000_000, 1_000_000, 400_000, 100_000, 100_000, 40_000, 10_000, 10_000,
           4_000, 2_000, 1_000, 1_000)  # fmt: skip

WORKLOADS = (
    Workload("GPT 1B", "gpt", "1b", "v5e:4x4"),
    Workload("DLRM", "dlrm", "criteo", "v5e:2x4",
             {"tables": _TABLES, "width": 64, "batch": 32_768}),
    Workload("MoE", "moe", "8x7b", "v6e:4x4",
             {"layers": 8, "width": 2048, "hidden": 4096, "heads": 16, "batch": 64,
              "length": 2048}),
    Workload("decode", "decode", "1b", "v5e:2x4", {"batch": 128}),
    Workload("long context", "gpt", "1b", "v5e:4x4", {"batch": 4, "length": 8192}),
    Workload("ViT-L", "vit", "l16", "v5e:2x4", {"batch": 512}),
    Workload("LoRA", "lora", "1b", "v5e:2x4", {"batch": 16}),
    Workload("128k words", "gpt", "1b", "v5e:4x4", {"layers": 4, "vocab": 128_256}),
    Workload("encoder-decoder", "encdec", "big", "v6e:4x4", {"batch": 512}),
    Workload("SSM", "ssm", "130m", "v5e:2x4"),
    Workload("U-Net", "unet", "cifar", "v5e:2x4", {"channels": (128, 256), "batch": 256}),
    Workload("GPT 8B", "gpt", "8b", "v5p:2x2x2", {"batch": 32}),
    Workload("GPT 8B in 46 GiB", "gpt", "8b", "v5p:2x2x2", {"batch": 32}, 46 * GIB),
    Workload("GPT 1B unrolled", "gpt", "1b", "v5e:4x4", {"layers": 4, "scan": False}),
    Workload("GPT 1B on two slices", "gpt", "1b", "v5e:2x4*2"),
)  # fmt: skip
