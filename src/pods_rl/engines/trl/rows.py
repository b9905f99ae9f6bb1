"""Groups over several processes: gathers of unequal shares, and the kept rows sent to the process that trains them.

Only one number per rollout and reward is sent, and the kept rows that another process trains; dropped rollouts stay
where they were generated.
"""

from __future__ import annotations

import base64
import io
import json
import secrets
import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from PIL import Image
from torch import Tensor
from torch.nn.functional import pad

from ...errors import UserError
from .batching import Shares
from .compat import gather, gathering_with
from .generated import Conversation


@dataclass(frozen=True)
class KeptRow:
    """One kept rollout, to be sent to another process.

    Args:
        completion_ids: its tokens, T of them.
        completion: its text, or its chat messages.
        logprobs: the sampler's, T of them; None if it returns none.
        extra: the columns that reward functions logged about it.
        more: of tools, environments, rollout functions and images; None without them.
    """

    completion_ids: list[int]
    completion: Any
    logprobs: Sequence[float | None] | None
    extra: dict[str, Any]
    more: Conversation | None = None


def to_bytes(rows: Sequence[KeptRow]) -> bytes:
    """Encode rows: tokens as int32, log-probabilities as float32, the rest as JSON, images in it as TIFF files.

    Example:
        >>> row = KeptRow([5, 6], "ab", None, {"graded": 1.0})
        >>> from_bytes(to_bytes([row, row])) == [row, row]
        True
    """
    parts: list[bytes] = []
    for row in rows:
        rest = json.dumps([row.completion, row.extra], ensure_ascii=False, default=plain)
        text = rest.encode("utf-8", "surrogatepass")
        more = b"" if row.more is None else _with_images(vars(row.more))
        flags = 2 * len(more) + (row.logprobs is not None)
        logprobs = array("f", [torch.nan if x is None else x for x in row.logprobs or ()])
        parts += [
            array("i", [len(row.completion_ids), len(logprobs), len(text), flags]).tobytes(),
            array("i", row.completion_ids).tobytes(),
            logprobs.tobytes(),
            text,
            more,
        ]
    return b"".join(parts)


def from_bytes(encoded: bytes) -> list[KeptRow]:
    """Decode the bytes of `to_bytes`. Missing log-probabilities become NaN, which TRL reads the same way."""
    rows: list[KeptRow] = []
    at = 0

    def take(length: int) -> bytes:
        nonlocal at
        at += length
        return encoded[at - length : at]

    while at < len(encoded):
        tokens, logprobs, text, flags = array("i", take(16))
        ids = array("i", take(4 * tokens)).tolist()
        floats = array("f", take(4 * logprobs)).tolist()
        completion, extra = json.loads(take(text).decode("utf-8", "surrogatepass"))
        more = Conversation(**_from_images(take(flags // 2))) if flags > 1 else None
        rows.append(KeptRow(ids, completion, floats if flags % 2 else None, extra, more))
    return rows


def _with_images(values: Mapping[str, Any]) -> bytes:
    """Encode plain values and images as JSON; a mark that nobody can guess tells images from what a policy wrote."""
    mark = secrets.token_hex(8)

    def encode(value: Any) -> Any:
        if not isinstance(value, Image.Image):
            return plain(value)
        file = io.BytesIO()
        value.save(file, "TIFF")
        return {mark: base64.b64encode(file.getvalue()).decode()}

    return f"{mark}{json.dumps(values, default=encode)}".encode("utf-8", "surrogatepass")


def _from_images(encoded: bytes) -> dict[str, Any]:
    text = encoded.decode("utf-8", "surrogatepass")
    mark, rest = text[:16], text[16:]

    def decode(found: dict[str, Any]) -> Any:
        if found.keys() != {mark}:
            return found
        image = Image.open(io.BytesIO(base64.b64decode(found[mark])))
        image.load()
        return image

    return json.loads(rest, object_hook=decode)


def plain(value: Any) -> Any:
    """Convert values that JSON does not support: numbers of numpy and torch by value, anything else to text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def own_rows(
    kept: Sequence[int],
    numbers: Sequence[int],
    completion_ids: Sequence[list[int]],
    completions: Sequence[Any],
    logprobs: Sequence[list[float | None]] | None,
    columns: Mapping[str, Sequence[Any]],
    more: Sequence[Conversation] = (),
) -> dict[int, KeptRow]:
    """Return the kept rollouts that this process generated, by number.

    Args:
        kept: the rollout of each row, over all processes.
        numbers: the rollouts that this process generated; the other arguments hold a value for each of them.
        more: empty without tools, environments, rollout functions and images.
    """
    place = {number: i for i, number in enumerate(numbers)}
    rows = {}
    for rollout in kept:
        i = place.get(rollout)
        if i is not None:
            extra = {name: values[i] for name, values in columns.items()}
            own = logprobs[i] if logprobs else None
            rows[rollout] = KeptRow(completion_ids[i], completions[i], own, extra, more[i] if more else None)
    return rows


def exchange_rows(
    shares: Shares,
    process: int,
    kept: Sequence[int],
    own: Mapping[int, KeptRow],
    device: torch.device,
    sources: Sequence[int],
) -> list[KeptRow]:
    """Return the rows this process trains, in the order a single process would have them. Collective.

    Args:
        process: this one.
        kept: the rollout of each row, `[P * M]`, the same on every process.
        own: the kept rollouts that this process generated.
        device: the device of the process group's tensors.
        sources: the process that generated the rollout of each row.
    """
    outgoing: list[list[KeptRow]] = [[] for _ in range(shares.processes)]
    for row, rollout in enumerate(kept):
        if sources[row] == process != shares.trainer(row):
            outgoing[shares.trainer(row)].append(own[rollout])
    received: list[Iterator[KeptRow]] = []
    if rows_moved(shares, sources):
        received = [iter(from_bytes(parcel)) for parcel in _all_to_all([to_bytes(rows) for rows in outgoing], device)]
    return [own[kept[row]] if sources[row] == process else next(received[sources[row]]) for row in shares.rows(process)]


def rows_moved(shares: Shares, sources: Sequence[int]) -> int:
    """Count the rows, over all processes, that are trained on another process than they were generated on."""
    return sum(source != shares.trainer(row) for row, source in enumerate(sources))


def token_labels(completion_ids: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Return a whole number for each completion, the same for the same tokens, int64.

    >>> one, same, other = token_labels([[5, 6], [5, 6], [56]], torch.device("cpu")).tolist()
    >>> one == same != other
    True
    """
    digests = [blake2b(array("q", ids).tobytes(), digest_size=8).digest() for ids in completion_ids]
    return torch.tensor([int.from_bytes(digest, "little", signed=True) for digest in digests], device=device)


def _all_to_all(parcels: Sequence[bytes], device: torch.device) -> list[bytes]:
    """Send each process its parcel; return what each process sent here."""
    sizes = torch.tensor([len(parcel) for parcel in parcels], device=device)
    incoming = torch.empty_like(sizes)
    dist.all_to_all_single(incoming, sizes)
    lengths = incoming.tolist()
    sent = torch.frombuffer(bytearray(b"".join(parcels)) or bytearray(1), dtype=torch.uint8)[: sum(map(len, parcels))]
    got = torch.empty(sum(lengths), dtype=torch.uint8, device=device)
    dist.all_to_all_single(got, sent.to(device), lengths, [len(parcel) for parcel in parcels])
    return [part.cpu().numpy().tobytes() for part in got.split(lengths)]


def check_agreement(kept: Tensor, rule: str, accelerator: Accelerator) -> None:
    """Raise UserError, on every process, if the processes did not keep the same rollouts."""
    if accelerator.num_processes == 1:
        return
    checksum = zlib.crc32(kept.contiguous().numpy().tobytes())
    seen = gather(torch.tensor([checksum], device=accelerator.device)).tolist()
    if len(set(seen)) > 1:
        others = [process for process, value in enumerate(seen) if value != seen[0]]
        raise UserError(
            f"rule {rule!r} kept other rollouts on process {', '.join(map(str, others))} than on process 0, from the "
            "same rewards: a rule may depend only on its arguments; draw from its `generator`"
        )


@contextmanager
def uneven_gathers(accelerator: Accelerator, counts: Sequence[int]) -> Iterator[None]:
    """Let TRL gather one value per rollout although the processes' shares differ by one.

    Collectives need equal shapes: each share is padded to the largest, gathered, and cut again. Equal shares need
    nothing and change nothing.
    """
    if len(set(counts)) <= 1:
        yield
        return
    with gathering_with(accelerator, partial(gather_shares, counts=counts)):
        yield


def gather_shares(tensor: Tensor, counts: Sequence[int]) -> Tensor:
    """Gather a tensor of `counts[process]` rows on each process; one number of each process as it is. Collective."""
    if tensor.ndim == 0:
        return gather(tensor)
    largest = max(counts)
    padded = pad(tensor, [0, 0] * (tensor.ndim - 1) + [0, largest - len(tensor)])
    parts = gather(padded).split(largest)
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])
