"""Chips and the links between them: every number in SI base units, with its source beside it.

Sources: [book] "How to Scale Your Model", parts 2 (TPUs) and 12 (GPUs); [cloud] Google Cloud's page
on each TPU version; [nvidia] NVIDIA's datasheets (dense, without sparsity); [nccl] the constants of
NCCL's own tuning model; [libtpu] what the ahead-of-time TPU compiler reports.
"""

import dataclasses
import math
from collections.abc import Mapping

from autoshard.errors import HardwareError

GIB = 2.0**30
LINK_KINDS = ("ici", "nvlink", "pcie", "infiniband", "dcn", "custom")
COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "permute")


@dataclasses.dataclass(frozen=True)
class Chip:
    """One device of a mesh: what it computes, moves and holds."""

    name: str
    flops_per_s: Mapping[str, float] = dataclasses.field(hash=False)  # matrix unit, by dtype name
    hbm_bytes_per_s: float
    hbm_bytes: float
    hbm_reserved_bytes: float = 0.0
    lanes: int = 1  # the minor dim of an array in HBM is padded to this
    sublane_bytes: int = 0  # the second minor dim is padded to this / item size; 0: not
    matmul_tile: tuple[int, int] = (1, 1)  # a matmul's dims are padded to this in time
    clock_hz: float | None = None
    vector_memory_bytes: float = 0.0  # of it, what the compiler gives to buffers
    cores: int = 1  # devices that this chip becomes when its cores are addressed apart

    def __post_init__(self):
        _check_positive(f"chip {self.name!r}", "hbm_bytes_per_s", self.hbm_bytes_per_s)
        _check_positive(f"chip {self.name!r}", "hbm_bytes", self.hbm_bytes)
        if not self.flops_per_s:
            raise HardwareError(f"chip {self.name!r} has no flops_per_s: give at least 'bfloat16'")
        for dtype, flops in self.flops_per_s.items():
            _check_positive(f"chip {self.name!r}", f"flops_per_s[{dtype!r}]", flops)
        if not 0 <= self.hbm_reserved_bytes < self.hbm_bytes:
            raise HardwareError(
                f"chip {self.name!r} reserves {self.hbm_reserved_bytes:g} of its"
                f" {self.hbm_bytes:g} bytes, wanted less"
            )

    @property
    def vector_ops_per_s(self) -> float | None:
        """Elementwise operations/s of a TPU: two a cycle in each of the 8 x 128 lanes of a core.

        What the TPU compiler's estimates of softmax and GELU come to. None for other chips, where
        memory decides.
        """
        if self.clock_hz is None or not self.sublane_bytes:
            return None
        return 2 * self.clock_hz * 8 * self.lanes * self.cores

    @property
    def usable_hbm_bytes(self) -> float:
        return self.hbm_bytes - self.hbm_reserved_bytes

    def flops_for(self, dtype: str) -> float:
        """Returns matmul FLOP/s for a dtype name, falling back to the nearest dtype listed."""
        for name in (dtype, *_nearest_dtypes(dtype)):
            if name in self.flops_per_s:
                return self.flops_per_s[name]
        return min(self.flops_per_s.values())

    def tile(self, itemsize: float) -> tuple[int, int]:
        """Returns what the last two dims of an array are padded to: (second minor, minor)."""
        if not self.sublane_bytes:
            return (1, self.lanes)
        return (max(1, int(self.sublane_bytes // max(itemsize, 1))), self.lanes)

    def stored_bytes(
        self,
        shape: tuple[int, ...],
        itemsize: float,
        majors: tuple[int, ...] = (),
        like: tuple[int, ...] | None = None,
    ) -> float:
        """Returns what one device's block of an array takes in HBM, two of its dims padded.

        The compiler orders the dims so that the padding is least, `majors` before all others, or so
        that it is least for a block of shape `like`, of which this one is gathered; a second minor
        dim smaller than the tile shrinks the tile to the next power of two. With all dims but the
        last in `majors`, that one is the minor one, however small.
        """
        size = math.prod(shape) * itemsize
        if not size or not self.sublane_bytes:
            return size
        if len(shape) < 2:
            return size * min((_padded(n, self.lanes) for n in shape), default=1.0)
        if like is None or math.prod(like) == 0:
            return size * self._padding(shape, itemsize, majors)[0]
        _, d, e = self._padding(like, itemsize, majors)
        return size * self._padded_by(shape, itemsize, d, e)

    def _padding(
        self, shape: tuple[int, ...], itemsize: float, majors: tuple[int, ...]
    ) -> tuple[float, int, int]:
        """Returns the least padding, and the minor and second minor dims that it takes: the last
        ones, as JAX has it, if others are no better."""
        dims = [d for d, n in enumerate(shape) if n > 1 and d not in majors]
        if majors == tuple(range(len(shape) - 1)):
            d, e = len(shape) - 1, len(shape) - 2
            return self._padded_by(shape, itemsize, d, e), d, e
        if len(dims) < 2:
            dims = range(len(shape))
        last = [*reversed(dims)]
        orders = [
            (self._padded_by(shape, itemsize, d, e), d, e) for d in last for e in last if d != e
        ]
        return min(orders, key=lambda order: order[0])

    def _padded_by(self, shape: tuple[int, ...], itemsize: float, minor: int, second: int) -> float:
        rows, lanes = self.tile(itemsize)
        return _padded(shape[minor], lanes) * _padded_rows(shape[second], rows) / shape[second]

    def move_s(self, shape: tuple[int, ...], itemsize: float) -> float:
        """Returns the seconds to copy one device's block from a buffer to another.

        A TPU copies by registers of 8 x 128 items, of 2 bytes no faster than of 4: of compiled v5e
        programs, 208 to 248 bytes of float32 a cycle and 111 of bfloat16, where HBM could read and
        write 270. Rows of a second minor dim below 8 fill them in part: 44 of bfloat16[.., 2, 128],
        124 against 271 of float32[.., 4, 1024], never worse than a quarter.
        """
        size = self.stored_bytes(shape, itemsize)
        if not self.sublane_bytes or not size:
            return 2 * size / self.hbm_bytes_per_s
        dims = [n for n in shape if n > 1]
        part = 1.0
        if len(dims) > 1 and dims[-2] < 8 and dims[-1] >= self.lanes:
            part = max(dims[-2] / 8, 0.25)
        return 2 * size * max(1.0, 4 / itemsize) / part / self.hbm_bytes_per_s

    def per_core(self) -> "Chip":
        """Returns the share of one core, for runtimes that show each core as a device."""
        return dataclasses.replace(
            self,
            name=f"{self.name}-core",
            flops_per_s={d: f / self.cores for d, f in self.flops_per_s.items()},
            hbm_bytes_per_s=self.hbm_bytes_per_s / self.cores,
            hbm_bytes=self.hbm_bytes / self.cores,
            hbm_reserved_bytes=self.hbm_reserved_bytes / self.cores,
            cores=1,
        )

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.flops_for('bfloat16') / 1e12:.0f} TFLOP/s bf16,"
            f" {self.hbm_bytes_per_s / 1e9:.0f} GB/s, {self.hbm_bytes / GIB:.4g} GiB"
        )


@dataclasses.dataclass(frozen=True)
class Link:
    """How the devices along one mesh axis reach each other.

    A `switched` link sends to any peer at full speed (by default all but ici); any other is a chain
    of neighbours, closed to a ring by `wrap`. An axis over several links (slices joined by DCN, two
    dims of a torus) has them as `parts`, `(size, link)` major first; its own numbers are
    then those of the slowest part.
    """

    kind: str
    bytes_per_s: float  # one way, per device
    both_ways: bool = True  # a wrapped ring uses both directions at once
    latency_s: float = 1e-6  # per hop
    wrap: bool = False
    overlaps: tuple[str, ...] = COLLECTIVES  # those that the compiler runs beside compute
    switched: bool | None = None  # None: by kind
    start_s: float = 0.0  # per collective
    parts: tuple[tuple[int, "Link"], ...] = ()
    pipelined: bool = False  # what a loop stacks is combined while its next trip computes

    def __post_init__(self):
        if self.kind not in LINK_KINDS:
            raise HardwareError(f"unknown kind of link {self.kind!r}: wanted one of {LINK_KINDS}")
        _check_positive(f"{self.kind} link", "bytes_per_s", self.bytes_per_s)
        for field in ("latency_s", "start_s"):
            value = getattr(self, field)
            if not (math.isfinite(value) and value >= 0):
                raise HardwareError(f"{self.kind} link has {field}={value}, wanted 0 or more")
        known = not isinstance(self.overlaps, bool | str) and set(self.overlaps) <= {*COLLECTIVES}
        if not known:
            raise HardwareError(
                f"{self.kind} link has overlaps={self.overlaps}: wanted some of {COLLECTIVES}"
            )
        object.__setattr__(self, "overlaps", tuple(self.overlaps))
        if self.switched is None:
            object.__setattr__(self, "switched", self.kind != "ici")

    @property
    def ring_bytes_per_s(self) -> float:
        """Bytes/s that each device receives in a ring collective."""
        both = self.both_ways and self.wrap and not self.switched
        return self.bytes_per_s * (2 if both else 1)

    def __str__(self) -> str:
        if self.parts:
            return " x ".join(f"{size} over {link}" for size, link in self.parts)
        ring = " ring" if self.wrap and not self.switched else ""
        return f"{self.kind}{ring} {self.bytes_per_s / 1e9:.4g} GB/s {self.latency_s * 1e6:.3g} us"


@dataclasses.dataclass(frozen=True)
class Fabric:
    """How chips are wired: domains (slices, nodes) of fast links, joined by slower ones."""

    inside: Link
    across: Link | None = None  # None: there is only one domain
    domain_size: int | None = None  # devices in one domain at most; None: no limit
    torus_dims: int = 0  # 0: a switch
    wrap_multiple: int = 0  # a torus dim is a ring if its size is a multiple of this
    on_chip: Link | None = None  # between the cores of a chip
    devices_per_chip: int = 1


@dataclasses.dataclass(frozen=True)
class Hardware:
    """A chip and its links: either wiring to be mapped to a mesh, or one link for each mesh axis.

    Example:
      Hardware("lab", chip, axis_links={"data": Link("dcn", 1e9), "model": Link("nvlink", 3e11)})
    """

    name: str
    chip: Chip
    links: Fabric | None = None
    axis_links: Mapping[str, Link] = dataclasses.field(default_factory=dict, hash=False)

    def __post_init__(self):
        if self.links is None and not self.axis_links:
            raise HardwareError(
                f"hardware {self.name!r} has no links: give axis_links={{axis: Link(...)}} for each"
                " mesh axis, or start from preset(name)"
            )

    def link_of(self, axis: str) -> Link:
        """Returns the link given for a mesh axis.

        Raises:
          HardwareError: axis_links lacks the axis.
        """
        try:
            return self.axis_links[axis]
        except KeyError:
            raise HardwareError(
                f"hardware {self.name!r} has no link for mesh axis {axis!r}: it has links for"
                f" {sorted(self.axis_links)}; add axis_links[{axis!r}] = Link(kind, bytes_per_s)"
            ) from None

    def __str__(self) -> str:
        links = self.links.inside if self.links else ", ".join(map(str, self.axis_links.values()))
        return f"{self.name} ({self.chip}; {links})"


def preset(name: str) -> Hardware:
    """Returns known hardware by name: `v5e` or `tpu-v5e`, `h100`, `cpu`, ...

    Raises:
      HardwareError: the name is unknown; the message lists those known.
    """
    key = name.strip().lower().removeprefix("nvidia").removeprefix("tpu").strip("- ")
    key = _ALIASES.get(key, key)
    if key not in PRESETS:
        raise HardwareError(
            f"unknown hardware {name!r}: known are {', '.join(PRESETS)}; for other machines give an"
            " autoshard.Hardware with your own Chip and Links"
        )
    return PRESETS[key]


def from_device_kind(kind: str) -> Hardware:
    """Returns the hardware of a device by the `device_kind` that JAX reports, `TPU v5 lite`.

    Raises:
      HardwareError: no preset matches the kind.
    """
    text = kind.lower()
    for part, name in _DEVICE_KINDS:
        if part in text:
            return PRESETS[name]
    raise HardwareError(
        f"unknown device kind {kind!r}: give hardware= one of {', '.join(PRESETS)}, an"
        " autoshard.Hardware of your own, or measure it with autoshard.calibrate(mesh)"
    )


def _padded(n: int, lanes: int) -> float:
    return math.ceil(n / lanes) * lanes / n


def _padded_rows(n: int, rows: int) -> int:
    rows = min(rows, 2 ** math.ceil(math.log2(n)))
    return math.ceil(n / rows) * rows


def _check_positive(owner: str, field: str, value: float):
    if not (math.isfinite(value) and value > 0):
        raise HardwareError(f"{owner} has {field}={value}, wanted a finite number above 0")


def _nearest_dtypes(dtype: str) -> tuple[str, ...]:
    """What to try, in order, for a dtype that a chip does not list."""
    if dtype.startswith("float8"):
        return ("float8_e4m3fn", "bfloat16", "float16")
    if dtype in ("int4", "uint4", "uint8", "int2", "uint2"):
        return ("int8", "bfloat16")
    if dtype.startswith("float4"):
        return ("float8_e4m3fn", "bfloat16")
    return {
        "float16": ("bfloat16",),
        "bfloat16": ("float16", "float32"),
        "int8": ("bfloat16",),
        "float8_e4m3fn": ("bfloat16",),
    }.get(dtype, ("float32", "bfloat16"))


def _tpu(name, bf16, int8, hbm_bytes_per_s, hbm_gib, reserved_gib, tile, clock_hz, fabric, **more):
    """More: fp8 (FLOP/s), cores, f32, vmem_mib."""
    flops = {"bfloat16": bf16, "float32": more.get("f32", bf16), "int8": int8}
    flops["float8_e4m3fn"] = more.get("fp8", bf16)
    return Hardware(
        name,
        Chip(
            name=name,
            flops_per_s=flops,
            hbm_bytes_per_s=hbm_bytes_per_s,
            hbm_bytes=hbm_gib * GIB,
            hbm_reserved_bytes=reserved_gib * GIB,
            lanes=128,  # [libtpu] tiles: (8, 128) of 4-byte items, (16, 128) of 2, (32, 128) of 1
            sublane_bytes=32,
            matmul_tile=(tile, tile),  # [book] part 2: 128x128, and 256x256 from v6e on
            clock_hz=clock_hz,
            vector_memory_bytes=more.get("vmem_mib", 0) * 2.0**20,
            cores=more.get("cores", 1),
        ),
        fabric,
    )


def _torus(
    ici_bytes_per_s,
    dcn_bytes_per_s,
    dims,
    wrap_multiple,
    pod,
    on_chip=None,
    devices_per_chip=1,
    overlaps=("permute",),
) -> Fabric:
    return Fabric(
        # [book] part 3: about 1 us a hop. The TPU compiler puts a barrier before every collective:
        # a message there and one back.
        inside=Link("ici", ici_bytes_per_s, latency_s=1e-6, start_s=2e-6, overlaps=overlaps),
        # Host to host over the network and PCIe on both sides; tens of us is a round figure.
        across=Link(
            "dcn", dcn_bytes_per_s, latency_s=20e-6, overlaps=("all-reduce",), pipelined=True
        ),
        domain_size=pod,
        torus_dims=dims,
        wrap_multiple=wrap_multiple,
        on_chip=on_chip,
        devices_per_chip=devices_per_chip,
    )


def _gpu(name, bf16, tf32, f64, int8, fp8, hbm_bytes_per_s, hbm_gib, clock_hz, nvlink, nic):
    # [nccl] about 6.6 us to launch, 0.6 us a hop over NVLink, 2.7 us over a network (LL protocol).
    flops = {"bfloat16": bf16, "float16": bf16, "float32": tf32, "float64": f64, "int8": int8}
    if fp8:
        flops["float8_e4m3fn"] = fp8
    return Hardware(
        name,
        Chip(
            name=name,
            flops_per_s=flops,
            hbm_bytes_per_s=hbm_bytes_per_s,
            hbm_bytes=hbm_gib * GIB,
            # JAX takes 3/4 of the memory unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise.
            hbm_reserved_bytes=hbm_gib * GIB / 4,
            matmul_tile=(64, 128),  # a Hopper warpgroup's tile is 64 rows; 128 columns are usual
            clock_hz=clock_hz,
        ),
        Fabric(
            inside=Link("nvlink", nvlink, latency_s=0.6e-6, start_s=6.6e-6),
            across=Link("infiniband", nic, latency_s=2.7e-6, start_s=6.6e-6),
            domain_size=8,  # [book] part 12: GPUs under one NVSwitch
        ),
    )


# FLOP/s, HBM and ICI: [book] part 2, "TPU Specs", or [cloud]; the book's one-way ICI figures are
# 0.9 of Google's bidirectional bandwidth a port. DCN a chip: [book] part 2.
# Reserve: [libtpu], which refuses what exceeds it. Float32 at JAX's default precision: bfloat16's
# rate over the ratio of cycles that [libtpu] gives a 4096-cubed matmul (v4, v5e, v6e: near 1).
# Vector memory: [libtpu] the most that its buffer assignments fill (v4, v7: not looked at).
# Overlaps: [libtpu] what is asynchronous in 70 compiled programs (v4, v7: not looked at). Between
# slices all is, but a compiled step of GPT 1B waits for most of it.
# Clock: FLOP/s over 2 x tile^2 x MXUs, 4 MXUs a core, two cores a chip of v4 and v5p.
_TPUS = (
    _tpu(
        "v4", 2.75e14, 2.75e14, 1.2e12, 32, 1.5, 128, 1.05e9, cores=2,
        fabric=_torus(4.5e10, 6.25e9, 3, 4, 4096, on_chip=Link("custom", 3e11, latency_s=1e-6)),
    ),
    _tpu(
        "v5e", 1.97e14, 3.94e14, 8.1e11, 16, 0.25, 128, 1.5e9, vmem_mib=112,
        fabric=_torus(4.5e10, 3.125e9, 2, 16, 256, overlaps=("all-gather", "permute")),
    ),
    _tpu(
        "v5p", 4.59e14, 9.18e14, 2.765e12, 96, 0.26, 128, 1.75e9, cores=2, f32=2.92e14, vmem_mib=48,
        fabric=_torus(9e10, 6.25e9, 3, 4, 8960, on_chip=Link("custom", 6e11, latency_s=1e-6)),
    ),
    _tpu(
        "v6e", 9.2e14, 1.84e15, 1.6e12, 32, 0.75, 256, 1.75e9, vmem_mib=112,
        fabric=_torus(9e10, 1.25e10, 2, 16, 256),
    ),
    # [cloud] "TPU7x": JAX shows each of the two chiplets as a device, so this is half a chip: 2307
    # TFLOP/s, 192 GiB, 7380 GB/s a chip, ICI as v5p, chiplet to chiplet 6 times one ICI link.
    _tpu(
        "v7", 1.1535e15, 1.1535e15, 3.69e12, 96, 1.25, 256, 2.2e9, fp8=2.307e15, f32=6.55e14,
        fabric=_torus(
            4.5e10, 6.25e9, 3, 4, 18432,
            on_chip=Link("custom", 5.4e11, latency_s=1e-6), devices_per_chip=2,
        ),
    ),
)  # fmt: skip

# [nvidia] datasheets of A100 SXM, H100 SXM, H200 SXM, HGX B200; HBM as CUDA reports it. NVLink one
# way and the network (400 Gb/s a GPU, 200 for A100): [book] part 12. float32 is TF32, the default.
_GPUS = (
    _gpu("a100-40", 3.12e14, 1.56e14, 1.95e13, 6.24e14, 0, 1.555e12, 40, 1.41e9, 3e11, 2.5e10),
    _gpu("a100-80", 3.12e14, 1.56e14, 1.95e13, 6.24e14, 0, 2.039e12, 80, 1.41e9, 3e11, 2.5e10),
    _gpu("h100", 9.9e14, 4.95e14, 6.7e13, 1.979e15, 1.979e15, 3.35e12, 79.1, 1.98e9, 4.5e11, 5e10),
    _gpu("h200", 9.9e14, 4.95e14, 6.7e13, 1.979e15, 1.979e15, 4.8e12, 140, 1.98e9, 4.5e11, 5e10),
    _gpu("b200", 2.25e15, 1.1e15, 4e13, 4.5e15, 4.5e15, 8e12, 178, 1.965e9, 9e11, 5e10),
)

# Virtual devices on one host: no datasheet, round numbers for a desktop core. calibrate() measures.
_CPU = Hardware(
    "cpu",
    Chip(
        name="cpu",
        flops_per_s={"float32": 5e10, "bfloat16": 1e10, "int8": 1e10, "float64": 2.5e10},
        hbm_bytes_per_s=1e10,
        hbm_bytes=4 * GIB,
    ),
    Fabric(inside=Link("custom", 2e9, latency_s=20e-6, start_s=50e-6, overlaps=())),
)

PRESETS: dict[str, Hardware] = {h.name: h for h in (*_TPUS, *_GPUS, _CPU)}

_ALIASES = {
    "v4p": "v4", "v5litepod": "v5e", "v5 lite": "v5e", "trillium": "v6e", "v7x": "v7", "7x": "v7",
    "ironwood": "v7", "a100": "a100-40", "a100-40gb": "a100-40", "a100-80gb": "a100-80",
    "h100-80gb": "h100", "gb200": "b200", "host": "cpu",
}  # fmt: skip

# Substrings of device_kind, the more specific first.
_DEVICE_KINDS = (
    ("v5 lite", "v5e"), ("v5e", "v5e"), ("v5", "v5p"), ("v6", "v6e"), ("tpu7", "v7"), ("v7", "v7"),
    ("v4", "v4"), ("a100-sxm4-80", "a100-80"), ("a100 80", "a100-80"), ("a100-80", "a100-80"),
    ("a100", "a100-40"), ("h100", "h100"), ("h200", "h200"), ("b200", "b200"), ("cpu", "cpu"),
)  # fmt: skip
