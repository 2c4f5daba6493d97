"""The check of copies between accelerators, with copies that are made on the host."""

import pytest
import torch

from dtorch.errors import MeshError
from dtorch.runtime import peers

FIRST, SECOND, THIRD = (torch.device("cuda", i) for i in range(3))


@pytest.fixture(autouse=True)
def copies(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.device, torch.device]]:
    made: list[tuple[torch.device, torch.device]] = []

    def copied(sent: torch.Tensor, source: torch.device, target: torch.device) -> torch.Tensor:
        made.append((source, target))
        if (source, target) == (THIRD, FIRST):
            return sent.where(torch.arange(len(sent)) < 1000, 0)
        return sent.clone()

    monkeypatch.setattr(peers, "_copied", copied)
    monkeypatch.setattr(peers, "_checked", set())
    return made


def test_each_pair_is_checked_once(copies: list[tuple[torch.device, torch.device]]) -> None:
    peers.check([None, FIRST, FIRST])
    assert copies == []
    for _ in range(2):
        peers.check([FIRST, None, SECOND, FIRST])
    assert copies == [(FIRST, SECOND), (SECOND, FIRST)]
    peers.check([THIRD, SECOND])
    assert copies[2:] == [(SECOND, THIRD), (THIRD, SECOND)]


def test_a_copy_that_does_not_arrive_names_the_pair() -> None:
    message = r"a copy from cuda:2 to cuda:0 arrived with 64536 of 65536 values changed(.|\n)*Fix: "
    for _ in range(2):
        with pytest.raises(MeshError, match=message):
            peers.check([FIRST, SECOND, THIRD])
