"""Runs that take less time under the same pressure on the tiers.

Users who think for minutes keep more KV waiting than a short run ever builds up. Divide the think time by a
factor, and as many fewer conversations wait at a time; divide what the tiers have for waiting conversations
by the same factor, and the share of them that fits is the same. What must not shrink is what does not wait:
the turns under way, whose number follows from the rate and the time that an answer takes. So

    think time  / factor
    host tier   / factor
    device tier = running + (device - running) / factor      running: KV of the turns under way, on average

with the rate of turns as it is, since it is what loads the device. A steady state comes in sooner, too, as
conversations last less long.
"""

from dataclasses import dataclass, replace

from benchmarks.workloads import WorkloadSettings
from pensieve_jax.core.errors import InvalidArgumentError


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiers:
    """Sizes of the tiers, for each device.

    Raises:
        InvalidArgumentError: a size is out of range.
    """

    device_bytes: float
    host_bytes: float

    def __post_init__(self) -> None:
        for name, value, least in (
            ("device_bytes", self.device_bytes, 1),
            ("host_bytes", self.host_bytes, 0),
        ):
            if value < least:
                raise InvalidArgumentError(f"{name}: got {value!r}, expected at least {least}")


def compress_tiers(tiers: Tiers, factor: float, running_bytes: float) -> Tiers:
    """Tiers for a think time divided by a factor.

    Args:
        tiers: for the whole think time.
        factor: at least 1.
        running_bytes: KV of the turns under way on average; see `running_bytes`.

    Raises:
        InvalidArgumentError: the factor is below 1, or turns under way fill the device.
    """
    _check_factor(factor)
    if not 0 <= running_bytes < tiers.device_bytes:
        raise InvalidArgumentError(
            f"running_bytes: got {running_bytes:.4g}, expected less than the device tier, "
            f"{tiers.device_bytes:.4g}"
        )
    waiting = tiers.device_bytes - running_bytes
    return Tiers(device_bytes=running_bytes + waiting / factor, host_bytes=tiers.host_bytes / factor)


def compress_workload(settings: WorkloadSettings, factor: float) -> WorkloadSettings:
    """The workload with its think time divided by a factor.

    Raises:
        InvalidArgumentError: the factor is below 1.
    """
    _check_factor(factor)
    return replace(settings, think_time_s=settings.think_time_s / factor)


def running_bytes(
    *,
    requests_per_s: float,
    output_tokens: float,
    s_per_token: float,
    context_tokens: float,
    kv_bytes_per_token: float,
) -> float:
    """KV of the turns under way on average: as many as come in the time that one takes (Little's law).

    Args:
        requests_per_s: turns per second.
        output_tokens: mean length of an answer.
        s_per_token: time that an answer takes for each of its tokens, at that rate.
        context_tokens: mean context of a turn under way.
        kv_bytes_per_token: on one device.
    """
    return requests_per_s * output_tokens * s_per_token * context_tokens * kv_bytes_per_token


def _check_factor(factor: float) -> None:
    if factor < 1:
        raise InvalidArgumentError(f"factor: got {factor!r}, expected at least 1")
