"""Groups that are spread over several processes: gathers of unequal shares, and rows sent to other processes.

Only rewards are gathered. Dropped rollouts stay where they were generated; a kept one moves only if another process
trains it.
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor
from torch.nn.functional import pad

from ...errors import UserError
from .compat import gather, gathering_with

Row = TypeVar("Row")


def move_rows(
    sources: Sequence[int], targets: Sequence[int], own: Callable[[int], Row], accelerator: Accelerator
) -> list[Row]:
    """Return the rows whose target is this process, in their order. Call this on every process.

    Args:
        sources: the process that has each row, over all processes.
        targets: the process that each row moves to.
        own: returns a row that this process has, by its number.
        accelerator: of this process. Rows travel as pickles between processes of one run, as accelerate sends objects.

    Example:
        >>> from accelerate import Accelerator
        >>> move_rows([0, 0], [0, 0], "ab".__getitem__, Accelerator(cpu=True))
        ['a', 'b']
    """
    process, processes = accelerator.process_index, accelerator.num_processes
    arriving: list[Iterator[Row]] = [iter(())] * processes
    if moved_rows(sources, targets):
        outgoing: list[list[Row]] = [[] for _ in range(processes)]
        for row, (source, target) in enumerate(zip(sources, targets, strict=True)):
            if source == process != target:
                outgoing[target].append(own(row))
        parcels = _all_to_all([pickle.dumps(rows) for rows in outgoing], accelerator.device)
        arriving = [iter(pickle.loads(parcel)) for parcel in parcels]
    return [
        own(row) if source == process else next(arriving[source])
        for row, (source, target) in enumerate(zip(sources, targets, strict=True))
        if target == process
    ]


def moved_rows(sources: Sequence[int], targets: Sequence[int]) -> int:
    """Return how many rows move to another process.

    >>> moved_rows([0, 0, 1], [0, 1, 1])
    1
    """
    return sum(source != target for source, target in zip(sources, targets, strict=True))


def _all_to_all(parcels: Sequence[bytes], device: torch.device) -> list[bytes]:
    """Send each process its parcel; return what each process sent here."""
    sizes = torch.tensor([len(parcel) for parcel in parcels], device=device)
    incoming = torch.empty_like(sizes)
    dist.all_to_all_single(incoming, sizes)
    lengths = incoming.tolist()
    sent = torch.frombuffer(bytearray(b"".join(parcels)), dtype=torch.uint8).to(device)
    got = torch.empty(sum(lengths), dtype=torch.uint8, device=device)
    dist.all_to_all_single(got, sent, lengths, sizes.tolist())
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
            "same rewards: a rule may depend only on its arguments. Draw random numbers from its `generator`."
        )


@contextmanager
def uneven_gathers(accelerator: Accelerator, counts: Sequence[int]) -> Iterator[None]:
    """Let TRL gather one value for each rollout although the processes' shares differ by one.

    Collectives need equal shapes: each share is padded to the largest, gathered, and cut again. Nothing changes where
    all shares are equal.
    """
    if len(set(counts)) <= 1:
        yield
        return
    with gathering_with(accelerator, partial(gather_shares, counts=counts)):
        yield


def gather_shares(tensor: Tensor, counts: Sequence[int]) -> Tensor:
    """Gather a tensor of `counts[process]` rows on each process; a number is gathered as it is."""
    if tensor.ndim == 0:
        return gather(tensor)
    largest = max(counts)
    padded = pad(tensor, [0, 0] * (tensor.ndim - 1) + [0, largest - len(tensor)])
    parts = gather(padded).split(largest)
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])
