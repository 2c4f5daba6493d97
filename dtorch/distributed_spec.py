"""Meshes and placements under one path: `DeviceMesh`, `Shard`, `Replicate`, `Partial`, `P`."""

from .mesh import DeviceMesh, init_device_mesh
from .placement import P, Partial, PartitionSpec, Placement, Replicate, Shard

__all__ = [
    "DeviceMesh",
    "P",
    "Partial",
    "PartitionSpec",
    "Placement",
    "Replicate",
    "Shard",
    "init_device_mesh",
]
