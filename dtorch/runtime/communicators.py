"""Collectives of several GPUs in one launch: NCCL, through PyTorch's own bindings.

Says which steps of a redistribution are one call of NCCL for a group of devices, launches the
call, and checks each group once. One thread launches for all devices of a group: the bindings take
all their tensors and streams and put the launches into one NCCL group, so that no launch waits for
one that another thread has yet to make. One lock for all launches gives groups that share devices
the same order on each of them. PyTorch makes the communicators of a group at its first launch, and
keeps them until the process ends.

Source: `torch.cuda.nccl`, ``torch/csrc/cuda/nccl.cpp``.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ..errors import DTorchError, MeshError
from ..mesh import Device
from ..placement import Partial
from ..redistribution import Collective, Step

VARIABLE = "DTORCH_NCCL"

_OPS = {"sum": 0, "max": 2, "min": 3}  # as in ncclRedOp_t
_INTEGERS = {torch.uint8, torch.int8, torch.int32, torch.int64}
_ADDED = _INTEGERS | {torch.float16, torch.bfloat16, torch.float32, torch.float64}
_MOVED = _ADDED | {torch.bool}  # which the bindings take for bytes

_NUM_ELEMENTS = 1 << 16
_SECONDS = 60.0

_lock = threading.Lock()
_checked: set[tuple[torch.device, ...]] = set()


def _after_fork_in_child() -> None:
    """CUDA does not work in a forked child; a thread of the parent may have held the lock."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork_in_child)


# -- what is carried -----------------------------------------------------------------------


def is_joined(group: Sequence[Device]) -> bool:
    """Returns whether a group of devices has a communicator.

    Those of several GPUs have, of which each is the first device on its GPU, so that all that
    NCCL runs on a GPU is launched on one stream. With ``CUDA_LAUNCH_BLOCKING=1`` a thread waits
    for each launch, the first of which would wait for the others.

    Raises:
        DTorchError: ``DTORCH_NCCL`` is neither 0 nor 1.
    """
    wanted = os.environ.get(VARIABLE) or "1"
    if wanted not in ("0", "1"):
        raise DTorchError(f"{VARIABLE}={wanted!r}: expected '0' or '1'.")
    if len(group) < 2 or any(device.type != "cuda" for device in group):
        return False
    is_blocking = os.environ.get("CUDA_LAUNCH_BLOCKING", "") not in ("", "0")
    if wanted == "0" or is_blocking or not hasattr(torch._C, "_nccl_all_reduce"):
        return False
    count = torch.cuda.device_count()
    return all(device.id < count for device in group)


def is_carried(step: Step, members: Sequence[int]) -> bool:
    """Returns whether NCCL has one call for what members of a mesh do in a step.

    It has none where their parts differ in shape or have no elements. Its maximum and minimum of
    floating-point numbers ignore NaN, which PyTorch's do not.
    """
    source, target = step.source, step.target
    shapes = {(source.local_shapes[m], target.local_shapes[m]) for m in members}
    if len(shapes) > 1 or any(0 in shape for pair in shapes for shape in pair):
        return False
    if step.kind is Collective.ALL_GATHER:
        return source.dtype in _MOVED
    if step.kind not in (Collective.ALL_REDUCE, Collective.REDUCE_SCATTER):
        return False
    before = source.placements[step.axes[0]]
    assert isinstance(before, Partial)
    return source.dtype in (_ADDED if before.op == "sum" else _INTEGERS) and before.op in _OPS


# -- launching -----------------------------------------------------------------------------


def launch(
    kind: Collective,
    op: str,
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    streams: Sequence[Any],
) -> None:
    """Launches a collective for all devices of a group, on a stream of each.

    The tensors of a device are used on its stream alone, which has to have waited for its input.

    Args:
        kind: The collective.
        op: The reduction, of one that reduces.
        inputs: What each device gives, contiguous and of one shape.
        outputs: What each device receives; of an all-gather with all inputs one after the other,
            of a reduce-scatter one of the equal pieces of an input.
        streams: A `torch.Stream` of each device.

    Blocking: until it has been launched; for a new group until its communicators are made.

    Raises:
        RuntimeError: NCCL has refused; the message names the collective and the devices.
    """
    with _lock:
        try:
            _call(kind, op, inputs, outputs, streams)
        except RuntimeError as error:
            devices = _names(tensor.device for tensor in inputs)
            raise RuntimeError(
                f"{kind.value} of {inputs[0].dtype} {list(inputs[0].shape)} on {devices} could "
                f"not be launched through NCCL: {error}\n"
                f"  Fix: {VARIABLE}=0, with which dtorch uses copies between the GPUs; "
                "NCCL_DEBUG=INFO shows what NCCL does."
            ) from error


def _call(
    kind: Collective,
    op: str,
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    streams: Sequence[Any],
) -> None:
    given, received = list(inputs), list(outputs)
    lanes = [
        torch.cuda.Stream(
            stream_id=s.stream_id, device_index=s.device_index, device_type=s.device_type
        )
        for s in streams
    ]
    bindings: Any = torch._C
    if kind is Collective.ALL_GATHER:
        bindings._nccl_all_gather(given, received, lanes, None)
    elif kind is Collective.ALL_REDUCE:
        bindings._nccl_all_reduce(given, received, _OPS[op], lanes, None)
    else:
        bindings._nccl_reduce_scatter(given, received, _OPS[op], lanes, None)


# -- the check -----------------------------------------------------------------------------


def check(groups: Iterable[Sequence[Device]]) -> None:
    """Compares what collectives give, once for each group of GPUs in a process.

    Args:
        groups: The groups of devices that a program launches collectives for.

    Blocking: the first time, until the collectives have been compared.

    Raises:
        MeshError: They gave other values than they should, failed, or did not end.
    """
    for group in groups:
        places = tuple(torch.device(device.type, device.id) for device in group)
        if places in _checked:
            continue
        # No other collective may be launched meanwhile: of two that run at once on the same GPUs,
        # each may hold what the other waits for.
        with _lock:
            try:
                fault = _fault(places)
                fault += _faulty_pairs(places) if fault else ""
            except TimeoutError as error:  # these GPUs stay busy with it: nothing more can be tried
                fault = f"{error}\n"
            if fault:
                raise MeshError(
                    f"collectives through NCCL do not work on {_names(places)}: {fault}"
                    f"  Fix: {VARIABLE}=0, with which dtorch uses copies between the GPUs; or turn "
                    "off IOMMU and PCI access control (ACS), the usual cause. NCCL_DEBUG=INFO "
                    "shows what NCCL does."
                )
            _checked.add(places)


def _fault(places: Sequence[torch.device]) -> str:
    """What is wrong with an all-reduce and an all-gather of GPUs, in a line, or nothing."""
    count = torch.arange(_NUM_ELEMENTS, dtype=torch.int32)
    sent = torch.stack([(count + i) * 40503 for i in range(len(places))])
    for kind, expected in (
        (Collective.ALL_REDUCE, sent.sum(0, dtype=torch.int32)),
        (Collective.ALL_GATHER, sent),
    ):
        try:
            received = _exchanged(kind, sent, expected.shape, places)
        except RuntimeError as error:
            return f"{kind.value}: {error}\n"
        for place, values in zip(places, received, strict=True):
            wrong = int((values != expected).sum())
            if wrong:
                return f"{kind.value} gave {wrong} of {expected.numel()} values wrong on {place}.\n"
    return ""


def _faulty_pairs(places: Sequence[torch.device]) -> str:
    """Which pairs of a group that is at fault are so too, in a line."""
    if len(places) == 2:
        return ""
    pairs = [pair for pair in itertools.combinations(places, 2) if _fault(pair)]
    names = "; ".join(map(_names, pairs))
    return f"  at fault alone: {names or 'no two of them'}\n"


def _exchanged(
    kind: Collective,
    sent: torch.Tensor,
    shape: torch.Size,
    places: Sequence[torch.device],
) -> list[torch.Tensor]:
    """What comes back to the host of a collective of values sent to GPUs."""
    for place in places:
        torch.cuda.synchronize(place)
    inputs = [values.to(place) for values, place in zip(sent, places, strict=True)]
    outputs = [torch.empty(shape, dtype=torch.int32, device=place) for place in places]
    streams = [torch.cuda.current_stream(place) for place in places]
    _call(kind, "sum", inputs, outputs, streams)
    events = [stream.record_event() for stream in streams]
    begin = time.monotonic()
    while not all(event.query() for event in events):
        if time.monotonic() - begin > _SECONDS:
            raise TimeoutError(
                f"{kind.value} on {_names(places)} did not end within {_SECONDS:.0f} s."
            )
        time.sleep(1e-4)
    return [output.cpu() for output in outputs]


def _names(places: Iterable[torch.device]) -> str:
    return ", ".join(map(str, places))
