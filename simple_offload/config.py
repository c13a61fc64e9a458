"""OffloadConfig: kv_connector_extra_config, validated."""

import difflib
import math
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from decimal import Decimal
from fractions import Fraction
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from simple_offload import memory
from simple_offload.logs import get_logger
from simple_offload.ranks import Ranks

GIB = memory.GIB

logger = get_logger(__name__)

_UNITS = {"": 1, "B": 1} | {
    letter + suffix: base**power
    for power, letter in enumerate("KMGT", start=1)
    for suffix, base in (("", 1024), ("I", 1024), ("IB", 1024), ("B", 1000))
}
_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[a-z]*)", re.IGNORECASE | re.ASCII)
_SHARE = re.compile(r"(?P<percent>\d+(?:\.\d+)?)\s*%", re.ASCII)
_NUMBER = re.compile(r"[+-]?\d+(?P<fraction>\.\d+)?", re.ASCII)
_FLAGS = {"true": True, "1": True, "false": False, "0": False}
_MEMORY_KEYS = ("cpu_bytes_to_use", "cpu_bytes_to_use_per_rank")
_SIZE_FORMS = 'a number of bytes or a size such as "64GiB", "512MiB" or "64GB"'
_MEMORY_FORMS = f'{_SIZE_FORMS}, or a share of memory such as "80%"'
_SIMILAR = 0.7
"""Likeness (difflib) to a known key from which an unknown one is an error, and not ignored."""


class ConfigError(ValueError):
    """An invalid configuration. The message names the key, the value and what is allowed."""


def nearest(name: str, known: Iterable[str]) -> str:
    """A question for the end of a message about ``name``; empty if no known name is similar."""
    near = difflib.get_close_matches(name.lower(), list(known), n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""


def parse_size(value: object) -> int:
    """Bytes from an int, a float (JSON's 6.4e10; a fraction is dropped) or a string with a unit.

    "GiB", "Gi" and "G" are 1024**3, "GB" is 10**9, likewise K, M and T.
    Raises PydanticCustomError otherwise.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return int(value)
    if isinstance(value, str) and (match := _SIZE.fullmatch(value.strip())):
        factor = _UNITS.get(match["unit"].upper())
        if factor is not None:
            return int(Fraction(match["number"]) * factor)
    raise PydanticCustomError("size", f"must be {_SIZE_FORMS}")


def parse_memory(value: object) -> int:
    """Bytes, as ``parse_size``, or of a share such as "80%": of the memory of this machine or of
    its cgroup, whichever is less. Raises PydanticCustomError otherwise.

    It is no share of what is available: ranks that start one after another would see different
    amounts (sglang#40135).
    """
    if (share := _share_of(value)) is None:
        with suppress(PydanticCustomError):
            return parse_size(value)
        raise PydanticCustomError("size", f"must be {_MEMORY_FORMS}")
    if not 0 < share <= 1:
        raise PydanticCustomError("size", "must be more than 0% and at most 100%")
    return int(memory.limit().num_bytes * share)


def _share_of(value: object) -> Fraction | None:
    """The share that "80%" stands for; None for values of another form."""
    match = _SHARE.fullmatch(value.strip()) if isinstance(value, str) else None
    return Fraction(match["percent"]) / 100 if match else None


def parse_flag(value: object) -> bool:
    """A bool, also in the forms that templates of configurations produce: "true", "False", 1.

    vLLM's built-in connector reads any non-empty string, even "false", as true. Here "false" is
    false. Raises PydanticCustomError for any other value.
    """
    if isinstance(value, str | int):
        flag = _FLAGS.get(str(value).strip().lower())
        if flag is not None:
            return flag
    raise PydanticCustomError("flag", "must be true or false")


def parse_number(value: object) -> float:
    """A number, also as text: "2.5". Raises PydanticCustomError for any other value."""
    if isinstance(value, str) and (match := _NUMBER.fullmatch(value.strip())):
        return float(value) if match["fraction"] else int(value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    raise PydanticCustomError("number", "must be a number")


def parse_whole_number(value: object) -> int:
    """A whole number, also as text: "128". Raises PydanticCustomError for any other value."""
    with suppress(PydanticCustomError):
        if isinstance(number := parse_number(value), int):
            return number
    raise PydanticCustomError("number", "must be a whole number")


def parse_text(value: object) -> str:
    """The text. Raises PydanticCustomError for any other value."""
    if isinstance(value, str):
        return value
    raise PydanticCustomError("text", "must be a string")


Bytes = Annotated[int, BeforeValidator(parse_size), Field(gt=0)]
MemoryBytes = Annotated[int, BeforeValidator(parse_memory), Field(gt=0)]
Flag = Annotated[bool, BeforeValidator(parse_flag)]
WholeNumber = Annotated[int, BeforeValidator(parse_whole_number)]
Number = Annotated[float, BeforeValidator(parse_number), Field(allow_inf_nan=False)]


class SecondTierConfig(BaseModel):
    """The value of ``second_tier``. Further keys are options of vLLM's tier of that ``type``."""

    model_config = ConfigDict(frozen=True, extra="allow", use_attribute_docstrings=True)

    type: Annotated[str, Field(min_length=1)]
    """"fs" for files, "obj" for S3, or another of vLLM's tiers."""

    bytes: Bytes | None = None
    """Limit of all files under ``root_dir``, also of other servers. "fs" needs it."""

    cache_namespace: Annotated[str, Field(min_length=1)] | None = None
    """A name for the model's weights. By default they are recognised by their files."""

    fetch: Literal["auto", "always"] = "auto"
    """"auto" leaves out what computing would bring sooner, as measured. "always" fetches all that
    is found, and has requests wait for it."""

    module_path: str | None = None
    """Module of a tier that vLLM does not have; ``type`` is its class."""

    @property
    def options(self) -> dict[str, Any]:
        """The options of vLLM's tier."""
        return dict(self.model_extra or {})


class OffloadConfig(BaseModel):
    """The keys of ``kv_connector_extra_config``. Those of vLLM's built-in
    SimpleCPUOffloadConnector keep their meaning. An unknown key is ignored (``ignored_keys``), as
    users keep those of other connectors, unless it resembles a known one."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    cpu_bytes_to_use: MemoryBytes = 8 * GIB
    """Host memory of the whole server, shared by its tensor and pipeline parallel ranks on all
    nodes. With data parallelism, each engine has this much. ``"80%"`` is a share of the memory of
    each machine, or of its cgroup."""

    cpu_bytes_to_use_per_rank: MemoryBytes | None = None
    """Host memory of each rank; overrides ``cpu_bytes_to_use``. ``"10%"`` is a share as there."""

    num_cpu_blocks: Annotated[WholeNumber, Field(ge=2)] | None = None
    """Host blocks of each rank, or of ranks that share them, including vLLM's null block. Always
    counted in device blocks, whatever ``cpu_block_size`` is. An error if the bytes, when also
    given, hold fewer."""

    cpu_block_size: Annotated[WholeNumber, Field(gt=0)] | None = None
    """Tokens of a host block, a multiple of a device block's tokens (the default). Larger blocks
    need fewer Python objects, for tiers of terabytes, but are stored only as a whole."""

    lazy_offload: Flag | None = None
    """When a block is stored. By default: early, as long as host memory has room that nothing else
    needs, otherwise when the device is about to evict it. ``true``: only then. ``false``: as soon
    as it is full, like all blocks of models with several KV cache groups, and larger host
    blocks."""

    store_threshold: Annotated[WholeNumber, Field(ge=1)] = 1
    """Store a block once this many requests, including the one that computed it, have had the
    prefix that ends with it. 2 keeps one-time prompts out of the tier."""

    backend: Literal["auto", "cuda", "npu", "host"] = "auto"
    """Copy backend: "cuda", "npu" for Ascend, "host" for vLLM on CPU, "auto" for the one of vLLM's
    platform."""

    copy_path: Literal["auto", "dma", "kernel", "batch", "single"] = "auto"
    """How the backend copies. CUDA: by DMA ("dma"), by a kernel on a few SMs ("kernel"), or by the
    faster of both for each copy, as measured at start ("auto"). NPU: in batches ("batch"), one
    copy at a time ("single"), or in batches where they work ("auto")."""

    kv_layout: Literal["auto", "keep"] = "auto"
    """"auto" asks vLLM for a KV cache layout in which a block of all layers is contiguous.
    "keep" asks for none."""

    sync_load_ms: Annotated[Number, Field(ge=0)] = 20.0
    """Schedule a request before its load ends if compute should wait at most this many
    milliseconds, on the device, for the rest. 0 schedules it after the end, as always with
    state (Mamba) layers."""

    overlap_loads: Flag = True
    """Begin to compute a request's first layers while the last layers of its load, if that is a
    long one, are on their way. On CUDA, with two new tokens or more; not with speculative decoding,
    state (Mamba) layers, or a model's own attention kernels."""

    host_copies: Literal["auto", "one", "private"] = "auto"
    """Copies in host memory of KV that several tensor parallel ranks have alike, as with MLA.
    "auto": one for the ranks of each NUMA node, or as "one" if a node has more ranks than another.
    "one": one for the ranks of each machine. "private": one for each rank."""

    second_tier: SecondTierConfig | None = None
    """What lies behind host memory, survives restarts, and may be shared by servers: a "type" of
    vLLM's second tiers with its options, such as
    ``{"type": "fs", "root_dir": "/nvme/kv", "bytes": "2TiB"}``."""

    keep_on_device_reset: Flag = False
    """Keep the host tier when the device's prefix cache alone is reset, as to measure hits. By
    default both are dropped, since trainers reset the device's cache after they have changed the
    model's weights."""

    allow_reports: Flag = False
    """Let any client learn where the tokens of its prompt came from (``report`` in requests.md).
    That tells it which prompts others have sent."""

    kv_offload_backend: Literal["cpu"] = "cpu"
    """Accepted for configurations of the built-in connector."""

    @classmethod
    def parse(cls, extra_config: Mapping[str, Any], ranks: Ranks) -> Self:
        """Validate ``extra_config`` for an engine of these ranks.

        Raises ConfigError, which names every wrong key, or a size that exceeds the memory of this
        machine (or of its cgroup).
        """
        ignored = ignored_keys(extra_config)
        own = {key: value for key, value in extra_config.items() if key not in ignored}
        try:
            config = cls.model_validate(own)
        except ValidationError as error:
            lines = [_explain(detail) for detail in error.errors()]
            raise ConfigError("kv_connector_extra_config: " + "; ".join(lines)) from None
        if _share_of(own.get("cpu_bytes_to_use")) is not None:  # other machines add theirs
            whole = config.cpu_bytes_to_use * ranks.num // (ranks.num_local or ranks.num)
            config = config.model_copy(update={"cpu_bytes_to_use": whole})
        config._check_memory(own.get(config._size_key), ranks)
        return config

    def bytes_per_rank(self, num_ranks: int) -> int:
        """Bytes of host memory of one rank of ``num_ranks``."""
        if self.cpu_bytes_to_use_per_rank is not None:
            return self.cpu_bytes_to_use_per_rank
        return self.cpu_bytes_to_use // num_ranks

    def num_host_blocks(self, block_bytes: int, num_ranks: int, num_sharing: int = 1) -> int:
        """Number of host blocks, of ``block_bytes`` each, of ``num_sharing`` ranks of ``num_ranks``
        that share their host memory.

        Raises ConfigError if there is no room for two (the first is vLLM's null block), or for an
        explicit ``num_cpu_blocks``.
        """
        budget = self.bytes_per_rank(num_ranks) * num_sharing
        fitting = budget // block_bytes
        owner = "rank" if num_sharing == 1 else f"{num_sharing} ranks"
        if self.num_cpu_blocks is not None:
            sized = self.model_fields_set.intersection(_MEMORY_KEYS)
            if sized and self.num_cpu_blocks > fitting:
                raise ConfigError(
                    f"num_cpu_blocks={self.num_cpu_blocks}: {budget} bytes per {owner} hold only "
                    f"{fitting} blocks of {block_bytes} bytes. Allowed: 2 to {fitting}, or more "
                    f"bytes in {' and '.join(sorted(sized))}"
                )
            return self.num_cpu_blocks
        if fitting < 2:
            raise ConfigError(
                f"{self._size_key}={getattr(self, self._size_key)}: {budget} bytes per {owner} "
                f"hold {fitting} blocks of {block_bytes} bytes. Allowed: at least 2, that is "
                f"{2 * block_bytes} bytes per {owner}"
            )
        return fitting

    def num_sub_blocks(self, block_size: int) -> int:
        """Number of device blocks, of ``block_size`` tokens each, in a host block.

        Raises ConfigError if ``cpu_block_size`` is not a multiple of ``block_size``.
        """
        if self.cpu_block_size is None:
            return 1
        num_sub_blocks, rest = divmod(self.cpu_block_size, block_size)
        if rest:
            nearest = max(1, num_sub_blocks + (2 * rest > block_size)) * block_size
            raise ConfigError(
                f"cpu_block_size={self.cpu_block_size}: must be a multiple of the {block_size} "
                f"tokens of a device block; the nearest is {nearest}"
            )
        return num_sub_blocks

    @property
    def _size_key(self) -> str:
        per_rank = self.cpu_bytes_to_use_per_rank is not None
        return "cpu_bytes_to_use_per_rank" if per_rank else "cpu_bytes_to_use"

    def _check_memory(self, given: object, ranks: Ranks) -> None:
        if self.num_cpu_blocks is not None and self.model_fields_set.isdisjoint(_MEMORY_KEYS):
            return  # a block's bytes depend on the model: host_pool.py checks them
        needed = self.bytes_per_rank(ranks.num) * ranks.num_here
        value = getattr(self, self._size_key) if given is None else given
        check_fits_memory(needed, self._size_key, value)


def ignored_keys(keys: Iterable[str]) -> list[str]:
    """Unknown ``keys`` that are similar to no known key."""
    known = OffloadConfig.model_fields
    return [key for key in keys if not difflib.get_close_matches(key.lower(), known, 1, _SIMILAR)]


def check_fits_memory(needed: int, key: str, value: object) -> None:
    """Raise ConfigError if ``needed`` bytes, asked for by ``key``, exceed the total memory of this
    machine or its cgroup. Only warn if a hypervisor may add memory."""
    limit = memory.limit()
    if needed <= limit.num_bytes:
        return
    if limit.is_final:
        raise ConfigError(
            f"{key}={value!r} asks for {Decimal(needed) / GIB:.2f} GiB of host memory, but this "
            f"machine (or its cgroup) has {limit.num_bytes / GIB:.2f} GiB in all"
        )
    logger.warning(
        "%s=%r asks for %.2f GiB of host memory, and this machine has %.2f GiB so far: the tier "
        "grows when a hypervisor adds more",
        key,
        value,
        Decimal(needed) / GIB,
        limit.num_bytes / GIB,
    )


def _explain(detail: ErrorDetails) -> str:
    """Describe one wrong key as 'key=value: allowed values'."""
    key = ".".join(str(part) for part in detail["loc"]) or "(whole)"
    if detail["type"] == "missing":
        return f"{key} is missing"
    value = detail["input"]
    known = list(OffloadConfig.model_fields)
    if detail["type"] == "extra_forbidden":
        return f"{key}={value!r}: unknown key{nearest(key, known)} (known: {', '.join(known)})"
    if key == "kv_offload_backend":
        return (
            f"{key}={value!r}: must be 'cpu': remove the key, set cpu_bytes_to_use, and "
            "second_tier for files behind host memory"
        )
    allowed = detail["msg"][0].lower() + detail["msg"][1:]
    if detail["type"] == "literal_error" and isinstance(value, str):
        allowed += nearest(value, re.findall(r"'(\w+)'", detail["ctx"]["expected"]))
    forms = {"second_tier.bytes": _SIZE_FORMS} | dict.fromkeys(_MEMORY_KEYS, _MEMORY_FORMS)
    if key in forms and detail["type"] != "size":
        allowed += f" ({forms[key]})"
    return f"{key}={value!r}: {allowed}"
