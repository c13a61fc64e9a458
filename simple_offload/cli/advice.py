"""One sentence of advice about a running server."""

import math
from collections.abc import Iterator

from simple_offload.cli.console import size_text
from simple_offload.cli.scrape import PREFIX, PROMPT_TOKENS, Scrape

_WORTHWHILE = 0.03
"""Share of the prompt tokens. The predicted curve errs by as much."""
_AS_MUCH = 0.01
"""Share of the prompt tokens that is too small to matter."""
_LOST = {
    "below_threshold": "came back before store_threshold requests had had them: a lower threshold "
    "finds them sooner.",
    "boundary": "lacked the state or window at their end, which is kept at few places.",
    "no_room": "found no room on the device for their load: allow fewer requests at a time "
    "(--max-num-seqs).",
    "not_asked": "asked no cache: their requests skip it, get their KV from another server, or go "
    "on with a streaming session.",
    "not_stored": "left the device before their store: it was too late, failed, or had no room.",
    "other_key": "are known under another cache_salt, LoRA adapter or image only.",
    "overload": "were bypassed, because all prompts together are too much for both caches: more "
    "host memory, or fewer sessions at a time, would find more.",
    "prompt_end": "are ends of prompts, shorter than a block: a smaller --block-size finds more "
    "of them.",
    "reset": "were lost by resets: keep_on_device_reset keeps them, if the weights stay.",
    "wish": "are missing because requests wished so (store: false).",
}
"""By reason, what follows "5% of the prompt tokens"."""
_PARTS = {0.25: "A quarter", 0.5: "Half"}
_MULTIPLES = {2.0: "twice", 4.0: "four times", 8.0: "eight times"}


def advise(now: Scrape, lately: Scrape | None = None) -> str:
    """The most valuable advice about the prompts of ``lately``, or all since the server's start:
    faults first, then what finds the most tokens, then what saves memory."""
    failures = now.by("reason", f"{PREFIX}failed_transfers_total")
    if failures.get("thread_died", 0) + failures.get("switched_off", 0):
        return "A copy thread has died, and the host tier is switched off: restart the server."
    now = lately or now
    sources = now.by("source", PROMPT_TOKENS)
    missed = now.by("reason", f"{PREFIX}missed_tokens_total")
    prompts = sum(sources.values())
    if not now.total(f"{PREFIX}capacity_blocks"):
        return "The host tier is not open yet."
    if not prompts:
        return "No prompts in the last hour." if lately else "No prompts yet."
    failed = missed.get("load_failed", 0) / prompts
    if failed >= _AS_MUCH:
        return (
            f"Loads fail: {failed:.0%} of the prompt tokens were computed because of it. Look at "
            "the server's log and at the device."
        )
    shares = {reason: num / prompts for reason, num in missed.items()}
    gain, text = max(_gains(now, shares), default=(0.0, ""))
    if gain >= _WORTHWHILE:
        return text
    return _differing(now, shares) or _saving(now)


def _gains(now: Scrape, shares: dict[str, float]) -> Iterator[tuple[float, str]]:
    """Shares of the prompt tokens that could have been found, and how."""
    ratios = now.hit_ratios()
    own = ratios.get(1.0)
    if own is None:
        share = shares.get("evicted", 0.0)
        text = f"{share:.0%} of the prompt tokens were evicted from host memory: more finds them."
        yield share, text
    elif larger := {times: ratios[times] - own for times in _MULTIPLES if times in ratios}:
        # The best doubling: a loop that is a little too long gains nothing before it fits.
        times = max(larger, key=lambda each: larger[each] / math.log2(each))
        memory = f"Host memory of {_memory(now, times)} ({_MULTIPLES[times]} as much)"
        yield larger[times], f"{memory} would find {100 * larger[times]:.0f} points more."
    for reason, share in shares.items():
        if reason in _LOST:
            yield share, f"{share:.0%} of the prompt tokens {_LOST[reason]}"


def _differing(now: Scrape, shares: dict[str, float]) -> str:
    """If half of all prompts part from earlier ones early: in a growing conversation they do so
    late."""
    lookups, name = now.total(f"{PREFIX}lookups_total"), f"{PREFIX}unseen_from_tokens"
    parting = now.by("le", f"{name}_bucket").get("+Inf", 0.0)
    missing, unseen = sum(shares.values()), shares.get("unseen", 0)
    if not lookups or parting <= lookups / 2 or unseen < missing / 2 or unseen < _WORTHWHILE:
        return ""
    same = now.quantile(name, lookups / 2 / parting)
    if same >= now.total(PROMPT_TOKENS) / lookups / 2:
        return ""
    if not same:
        return "Most prompts are new from their first token on: no memory finds them."
    return (
        f"Most prompts differ after about {same:,.0f} tokens: move what changes (dates, names) "
        "towards their end."
    )


def _saving(now: Scrape) -> str:
    capacity, used = (now.total(f"{PREFIX}{name}_blocks") for name in ("capacity", "used"))
    if used < capacity / 2:
        return f"The tier is half empty: contents take {used / capacity:.0%} of {_memory(now, 1)}."
    ratios = now.hit_ratios()
    if 1.0 not in ratios:
        return "Nothing yet: to predict other sizes of host memory takes more prompts."
    enough = [times for times in ratios if ratios[times] >= ratios[1.0] - _AS_MUCH]
    times = min(enough)
    if times == 0:
        return "The device alone would find as much: host memory adds nothing to these prompts."
    if times in _PARTS:
        return f"{_PARTS[times]} of the host memory ({_memory(now, times)}) would find as much."
    return "The host memory fits: half of it would find less, and more of it hardly more."


def _memory(now: Scrape, times: float) -> str:
    return size_text(times * now.total(f"{PREFIX}host_memory_bytes"))
