"""Objects: vLLM's second tier (``SecondaryTierManager``), driven from our scheduler side."""

import inspect
import os
import re
from collections.abc import Callable, Sequence
from random import SystemRandom
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar

import numpy as np
from pydantic_core import PydanticCustomError
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, get_block_hash, get_group_id
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingSpec,
    OffloadKey,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.fs import io as fs_io

from simple_offload.config import (
    ConfigError,
    SecondTierConfig,
    nearest,
    parse_flag,
    parse_number,
    parse_text,
    parse_whole_number,
)
from simple_offload.logs import get_logger
from simple_offload.scheduler.tier.groups import Groups

logger = get_logger(__name__)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

_OURS = {"self", "offloading_spec", "primary_kv_view", "tier_type", "backpressure_detector"}
"""Arguments of a tier that are no options of users."""
_PARSERS = {
    "bool": parse_flag,
    "int": parse_whole_number,
    "float": parse_number,
    "str": parse_text,
}
"""By the type of an option, as the tier's signature names it."""
P = ParamSpec("P")
T = TypeVar("T")
_STEP = ScheduleEndContext(new_req_ids=(), preempted_req_ids=())


class Ended(NamedTuple):
    """A read or write that has ended. vLLM's tier touches its rows no more."""

    id: int
    num_read: int
    """Objects that were read, from the first on."""
    ok: bool


class Objects:
    """Asks for objects, reads them into rows of host memory and writes them, without waiting.

    One thread calls it, the scheduler's, as vLLM's tiers expect. An exception of the tier ends
    nothing: it is kept in ``error``, and nothing more is asked of the tier than what has ended.
    """

    def __init__(
        self, config: SecondTierConfig, spec: OffloadingSpec, view: memoryview, salt: bytes
    ) -> None:
        """``view``: the rows. ``salt``: of the names, so that objects of other namespaces have
        others. Raises ConfigError if vLLM's tier does not start."""
        self.error: Exception | None = None
        self._salt = salt
        self._next_id = 0
        self._reads: dict[int, list[bytes]] = {}
        wanted = require_known_options(config)
        # vLLM 0.32's fs tier draws the names of temporary files from ``random``, which vLLM seeds.
        # Of two servers with one seed that write one object, one would fail (FileExistsError).
        setattr(fs_io, "random", SystemRandom())  # noqa: B010
        if config.type == "obj":
            # vLLM 0.32's tier asks NIXL for the time of each transfer, and fails if NIXL has none.
            os.environ.setdefault("NIXL_TELEMETRY_ENABLE", "y")
        try:
            self.tier = SecondaryTierFactory.create_secondary_tier(wanted, view, spec)
        except (OSError, RuntimeError, ValueError, TypeError, ImportError) as error:
            raise ConfigError(f"second_tier={wanted!r}: it does not start: {error}") from error
        # A tier of one's own may be made from vLLM's fs tier. Its files are left to it.
        self._mapper = getattr(self.tier, "file_mapper", None) if config.type == "fs" else None

    # Names

    def name(self, key: BlockHashWithGroupId) -> OffloadKey:
        """The name of the object with the contents of ``key``: its hash, salted."""
        block_hash = get_block_hash(key)
        salted = int.from_bytes(block_hash) ^ int.from_bytes(self._salt[: len(block_hash)])
        return make_offload_key(salted.to_bytes(len(block_hash)), int(get_group_id(key)))

    def paths(self, names: Sequence[OffloadKey]) -> list[str]:
        """The files of objects, as vLLM's fs tier names them; none for other tiers."""
        mapper = self._mapper
        return [mapper.get_file_name(name) for name in names] if mapper is not None else []

    # Work

    def ask(self, name: OffloadKey, request_id: str) -> bool | None:
        """Whether there is an object ``name``; None if that is not known yet."""
        answer = self._call(self.tier.lookup, name, ReqContext(request_id))
        if answer is LookupResult.MISS:
            return False
        return True if answer is LookupResult.HIT else None

    def on_answered(self, request_id: str) -> None:
        """The request asks no more. A tier that has failed is told too, or it would keep the
        answers for ever."""
        try:
            self.tier.on_request_finished(ReqContext(request_id))
        except Exception as error:  # noqa: BLE001 - whatever it is, the server goes on
            self._fail(error)

    def flush(self) -> None:
        """Send what has been asked."""
        self._call(self.tier.on_schedule_end, _STEP)

    def read(self, names: Sequence[OffloadKey], rows: Sequence[int], request_id: str) -> int:
        """Begin to read objects into ``rows``. Returns the id of this read."""
        job = self._job(names, rows, request_id, is_read=True)
        self._reads[job.job_id] = list(names)
        self._call(self.tier.submit_load, job)
        return job.job_id

    def write(self, names: Sequence[OffloadKey], rows: Sequence[int]) -> int:
        """Begin to write ``rows`` as objects. Returns the id of this write."""
        job = self._job(names, rows, "", is_read=False)
        self._call(self.tier.submit_store, job)
        return job.job_id

    def drain_ended(self) -> list[Ended]:
        """Reads and writes that have ended since the last call."""
        ended = []
        results: list[JobResult] = []
        try:
            results.extend(self.tier.get_finished_jobs())
        except Exception as error:  # noqa: BLE001 - whatever it is, the server goes on
            self._fail(error)
        for result in results:
            names = self._reads.pop(result.job_id, [])
            read = {*(names if result.success else result.successful_keys or ())}
            num_read = next((i for i, name in enumerate(names) if name not in read), len(names))
            ended.append(Ended(result.job_id, num_read, result.success))
        return ended

    def drain(self) -> None:
        """Wait until all reads and writes have ended."""
        self._call(self.tier.drain_jobs)

    def close(self) -> None:
        """Finish what is under way. May take as long as the tier hangs."""
        self.tier.shutdown()

    def _call(self, method: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """None: the tier has failed, now or before."""
        if self.error is not None:
            return None
        try:
            return method(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - whatever it is, the server goes on
            self._fail(error)
            return None

    def _fail(self, error: Exception) -> None:
        if self.error is None:
            self.error = error
            logger.error("vLLM's second tier raised an exception", exc_info=error)

    def _job(
        self, names: Sequence[OffloadKey], rows: Sequence[int], request_id: str, *, is_read: bool
    ) -> TransferJob:
        job_id, self._next_id = self._next_id, self._next_id + 1
        context = ReqContext(request_id)
        return TransferJob(job_id, names, np.array(rows, np.int32), is_read, context)


class _Spec(OffloadingSpec):
    """What vLLM's tiers ask of OffloadingConnector's settings. It has neither manager nor
    worker: those are ours."""

    def get_manager(self) -> Any:
        raise NotImplementedError

    def get_worker(self, kv_caches: Any) -> Any:
        raise NotImplementedError


def make_spec(
    name: str,
    vllm_config: "VllmConfig",
    kv_cache_config: "KVCacheConfig",
    groups: Groups,
    row_bytes: int,
) -> OffloadingSpec:
    """The settings of rows that have the pages of all ranks, as of one worker. ``name``: of the
    namespace, for vLLM's folders; a model may have another path on another server."""
    transfer_config = vllm_config.kv_transfer_config
    return _Spec(
        OffloadingConfig(
            groups=tuple(
                OffloadingGroupConfig(groups.block_sizes[index], tuple(group.layer_names), index)
                for index, group in enumerate(kv_cache_config.kv_cache_groups)
            ),
            worker_kv_bytes_per_block=row_bytes,
            enable_kv_cache_events=False,
            extra_config={},
            engine_id=str(transfer_config.engine_id if transfer_config else ""),
            model=OffloadingModelConfig(name, str(vllm_config.cache_config.cache_dtype)),
            cache=OffloadingCacheConfig(groups.hash_block_size, blocks_per_chunk=1),
            # One rank, whose rows have the pages of all: only the scheduler's process copies.
            parallel=OffloadingParallelConfig(
                rank=0,
                world_size=1,
                tp_size=1,
                pp_size=1,
                pcp_size=1,
                dcp_size=1,
                data_parallel_index=0,
                data_parallel_size=1,
                data_parallel_rank_local=None,
                is_parallelism_agnostic=True,
            ),
        )
    )


def require_known_options(config: SecondTierConfig) -> dict[str, Any]:
    """What vLLM makes a tier from. Raises ConfigError for a type that vLLM does not have, or an
    option that this type lacks."""
    # The class. vLLM would import it after the model is loaded.
    wanted = {"type": config.type, "module_path": config.module_path}
    try:
        tier: type[SecondaryTierManager] = SecondaryTierFactory.get_tier_class(wanted)
    except ValueError as error:
        listed = re.search(r"Supported types: \[(.*?)\]", str(error))
        known = re.findall(r"'(\w+)'", listed[1] if listed else "")
        raise ConfigError(
            f"second_tier.type={config.type!r}: unknown{nearest(config.type, known)} "
            f"(known: {', '.join(known)}; for one of your own, set module_path too)"
        ) from None
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"second_tier.type={config.type!r}: it cannot be imported: {error}"
        ) from error
    except (AssertionError, TypeError) as error:
        raise ConfigError(
            f"second_tier.type={config.type!r}: {config.module_path} has no such class that is a "
            "SecondaryTierManager"
        ) from error
    if tier.serve_external_requests is not SecondaryTierManager.serve_external_requests:
        raise ConfigError(
            f"second_tier.type={config.type!r}: it serves other engines from host memory, which "
            "needs vLLM's OffloadingConnector; allowed: 'fs', 'obj', or a tier that does not"
        )
    # Its options: vLLM would look at them after the model is loaded, too.
    wanted |= _options(config, tier)
    # The limit, which vLLM's tiers do not have: without one, files would fill the disk.
    if config.type == "fs" and config.bytes is None:
        raise ConfigError(
            "second_tier.bytes is missing: 'fs' needs a limit of all files under root_dir, such as "
            '"bytes": "2TiB"'
        )
    if config.type != "fs" and config.bytes is not None:
        raise ConfigError(
            f"second_tier.bytes={config.bytes}: only 'fs' has a limit of ours; allowed: none"
        )
    return wanted


def _options(config: SecondTierConfig, tier: "type[SecondaryTierManager]") -> dict[str, Any]:
    """The options as the tier's signature has them, flags and numbers parsed. Raises ConfigError
    for one that is unknown, missing, or of another type."""
    parameters = inspect.signature(tier).parameters
    options = {name: each for name, each in parameters.items() if name not in _OURS}
    takes_any = any(each.kind is each.VAR_KEYWORD for each in options.values())
    known = [*options, *SecondTierConfig.model_fields]
    parsed = config.options
    for key, value in parsed.items():
        if key in options:
            annotation = options[key].annotation
            parse = _PARSERS.get(getattr(annotation, "__name__", annotation))
            try:
                parsed[key] = parse(value) if parse else value
            except PydanticCustomError as error:
                raise ConfigError(f"second_tier.{key}={value!r}: {error.message()}") from None
        elif not takes_any:
            raise ConfigError(
                f"second_tier.{key}={value!r}: unknown{nearest(key, known)} "
                f"(known for {config.type!r}: {', '.join(known)})"
            )
    for key, each in options.items():
        if not takes_any and each.default is each.empty and parsed.get(key) in (None, ""):
            raise ConfigError(f"second_tier.{key} is missing: {config.type!r} needs it")
    return parsed
