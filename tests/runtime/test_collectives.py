"""Pieces of parts that lie elsewhere are brought to the device that joins them."""

from typing import Any

import pytest
import torch
from layouts import SUM, R, S, spread, values

import dtorch
from dtorch import Partial
from dtorch.mesh import Device
from dtorch.runtime import collectives
from dtorch.runtime.collectives import Join, Meeting, Piece, Round

META = torch.device("meta")


@pytest.mark.parametrize(
    ("round", "shape"),
    [
        (Round((Piece(0),), Join.SAME), (4, 6)),
        (Round((Piece(0, ((0, 1, 2),)),), Join.COPY), (2, 6)),
        (Round((Piece(0), Piece(1)), Join.CONCATENATE, 1), (4, 12)),
        (Round((Piece(0), Piece(1)), Join.REDUCE, op="sum"), (4, 6)),
        (Round((Piece(0), Piece(1)), Join.REDUCE, op="max"), (4, 6)),
        (Round((Piece(0), Piece(1)), Join.REDUCE, op="avg"), (4, 6)),
        (Round((Piece(1, (), ((0, 1, 4),)),), Join.PLACE, shape=(8, 6)), (8, 6)),
    ],
    ids=lambda value: value.join.name if isinstance(value, Round) else "",
)
def test_pieces_are_brought_to_the_meeting(round: Round, shape: tuple[int, ...]) -> None:
    """Of parts of which one is where the device is, and the other is not."""
    group = dtorch.DeviceMesh("cpu", [19_000, 19_001]).devices
    parts = [torch.ones(4, 6), torch.ones(4, 6, device=META)]
    meeting = Meeting(group, group, 0, (round,), torch.float32, META)
    for given in (parts, parts[::-1]):
        found = collectives.join(round, meeting, given)
        assert found.device == META and tuple(found.shape) == shape
    if round.join is not Join.PLACE:  # there, what adds nothing is written first
        on_host = Meeting(group, group, 0, (round,), torch.float32, torch.device("cpu"))
        assert collectives.join(round, on_host, [parts[0]] * 2).device.type == "cpu"


@pytest.mark.parametrize("source", [SUM, Partial("max"), S(1), S(0)], ids=str)
@pytest.mark.parametrize("target", [R, S(0)], ids=str)
def test_both_executors_bring_pieces(
    monkeypatch: pytest.MonkeyPatch, source: Any, target: Any
) -> None:
    """What takes pieces of the host is elsewhere, for each kind of step."""
    real = collectives.meeting

    def elsewhere(step: Any, device: Device) -> Any:
        found = real(step, device)
        is_away = found is not None and found.visitors
        fields = ("group", "visitors", "member", "rounds", "dtype")
        return Meeting(*(getattr(found, f) for f in fields), META) if is_away else found

    monkeypatch.setattr(collectives, "meeting", elsewhere)
    mesh = dtorch.DeviceMesh("cpu", [19_000, 19_001])
    moved = spread(values((4, 6)), mesh, [source]).redistribute(placements=[target])
    if source == target:
        return
    for index, shape in enumerate(moved._spec.local_shapes):
        moved._shards.wait((index,))
        part = moved._shards.get(index)
        assert part.device == META and tuple(part.shape) == shape
