"""Which parameters each unit of a sharded module holds."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

from zpp.zero3.unit import Owners

Group = tuple[tuple[str, nn.Module], Owners]


def group_parameters(root: nn.Module, units: list[nn.Module]) -> list[Group]:
    """The parameters of each unit, and last those of the root; a shared one belongs to the root."""
    names = {module: name for name, module in root.named_modules()}
    for unit in units:
        if unit not in names or unit is root:
            raise ValueError(f"unit {type(unit).__name__} is not a submodule of {type(root).__name__}")
    if len(set(units)) < len(units):
        raise ValueError("a unit is given twice")
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    homes: dict[nn.Parameter, set[int]] = {}
    inside = {module: i for i, unit in enumerate(units) for module in unit.modules()}
    for module in root.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            where = names[module] or "the root"
            if parameter.dtype != torch.float32:
                raise TypeError(f"parameter {name} of {where} is {parameter.dtype}, not float32")
            if parameter.is_meta:
                raise ValueError(f"parameter {name} of {where} has no values, it is on the meta device")
            places.setdefault(parameter, []).append((module, name))
            homes.setdefault(parameter, set()).add(inside.get(module, len(units)))
    owners: list[Owners] = [{} for _ in range(len(units) + 1)]
    for parameter, home in homes.items():
        owners[home.pop() if len(home) == 1 else len(units)][parameter] = places[parameter]
    if not any(owners):
        raise ValueError(f"{type(root).__name__} has no parameters")
    owned = [*((names[unit], unit) for unit in units), ("(root)", root)]
    return [(owner, group) for owner, group in zip(owned, owners, strict=True) if group]


def digest(groups: list[Group]) -> str:
    """Names, shapes and values of all parameters, in a few characters."""
    hashed = hashlib.sha256()
    for (name, _), owners in groups:
        for parameter, places in owners.items():
            bits = int(parameter.detach().reshape(-1).view(torch.int32).sum(dtype=torch.int64))
            hashed.update(f"{name} {places[0][1]} {tuple(parameter.shape)} {bits};".encode())
    return hashed.hexdigest()[:16]
