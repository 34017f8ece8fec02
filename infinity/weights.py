"""Weights into the planes at start, and out of them at the end, unit by unit, so that host memory stays within its budget.

A model may be whole, or on the meta device: then each module that owns meta tensors is made real just before its unit is written, by
its own ``reset_parameters``, keeping the identity of parameters and the ties between them.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Iterable

import numpy as np
import torch
from torch import nn
from torch.utils import swap_tensors

from infinity.errors import ModelError
from infinity.flat_param import FlatParam, Unit
from infinity.kernel_args import Kernel, pack_split
from infinity.layout import PARAM, RESIDUAL
from infinity.native import check, ffi, lib
from infinity.planes import Bytes, Planes


def check_meta(model: nn.Module) -> None:
    """Errors: ModelError names every module that owns meta tensors and cannot initialise them, and meta tensors that cannot be replaced."""
    modules = ((name or type(model).__name__, module) for name, module in model.named_modules())
    bad = [name for name, module in modules if owns_meta(module) and not hasattr(module, "reset_parameters")]
    if bad:
        raise ModelError(
            f"the model has meta tensors, and these modules have no reset_parameters() to give them values: {', '.join(bad)}. "
            "Give them one, or build the model on the CPU."
        )
    bad = [name for name, param in model.named_parameters() if param.is_meta and weakref.getweakrefs(param)]
    if bad:
        raise ModelError(
            f"the model has meta tensors that something refers to weakly, as recurrent layers do, so that they cannot be replaced: "
            f"{', '.join(bad)}. Build the model on the CPU."
        )


def owns_meta(module: nn.Module) -> bool:
    """Has ``module`` itself, not its children, a tensor on the meta device?"""
    own = (*module._parameters.values(), *module._buffers.values())
    return any(tensor is not None and tensor.is_meta for tensor in own)


def make_real(modules: Iterable[nn.Module], managed: set[int]) -> None:
    """Gives meta tensors memory and values. Parameters whose id is in ``managed`` have theirs, and are kept out of the way."""
    for module in modules:
        if not owns_meta(module):
            continue
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None and tensor.is_meta:
                empty = torch.empty_like(tensor, device="cpu")
                real = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
                swap_tensors(tensor, real)  # type: ignore[no-untyped-call]
        borrowed = {name: param for name, param in module._parameters.items() if param is not None and id(param) in managed}
        for name, param in borrowed.items():
            module._parameters[name] = nn.Parameter(torch.empty(param.shape, dtype=param.dtype), requires_grad=False)
        try:
            module.reset_parameters()  # type: ignore[operator]
        finally:
            module._parameters.update(borrowed)


@torch.no_grad()
def write_unit(unit: Unit, planes: Planes) -> None:
    """Writes every stored plane of ``unit`` from its parameters as they are now: their values, and zeros for the optimizer's states."""
    for flat in unit.flats:
        for tile in range(flat.spec.n_tiles):
            begin, end = flat.spec.tile_range(tile)
            content = _tile(flat, begin, end)
            for plane in flat.spec.planes:
                data = content.get(plane.name)
                planes.fill(flat, plane.name, begin, np.zeros((end - begin) * plane.elem_nbytes, np.uint8) if data is None else data)


def _tile(flat: FlatParam, begin: int, end: int) -> dict[str, Bytes]:
    split = RESIDUAL in flat.spec.grids
    values = torch.zeros(end - begin, dtype=torch.float32 if split else flat.dtype)
    for place, first, last in flat.spec.segments(begin, end):
        source = flat.params[flat.number_of(place)].detach().reshape(-1)
        values[first - begin : last - begin] = source[first - place.elem_offset : last - place.elem_offset].to("cpu", values.dtype)
    if not split:
        return {PARAM: values.view(torch.uint8).numpy()}
    hi, lo = np.empty(end - begin, np.uint16), np.empty(end - begin, np.uint16)
    args = pack_split(values.data_ptr(), int(hi.ctypes.data), int(lo.ctypes.data), end - begin)
    check(lib.inf_kernel_run(Kernel.SPLIT, args, len(args), ffi.new("uint64_t *")), "split")
    return {PARAM: hi.view(np.uint8), RESIDUAL: lo.view(np.uint8)}


def master(flat: FlatParam, index: int, planes: Planes) -> torch.Tensor:
    """The fp32 value of parameter ``index``, exact; for a frozen one its only plane as fp32."""
    place = flat.spec.params[index]
    param = planes.read(flat, PARAM, place.elem_offset, place.elem_end)
    if RESIDUAL not in flat.spec.grids:
        return torch.from_numpy(param).view(flat.dtype).view(place.spec.shape).float()
    residual = planes.read(flat, RESIDUAL, place.elem_offset, place.elem_end)
    joined = np.empty(place.numel, np.float32)
    args = pack_split(int(joined.ctypes.data), int(param.ctypes.data), int(residual.ctypes.data), place.numel)
    check(lib.inf_kernel_run(Kernel.JOIN, args, len(args), ffi.new("uint64_t *")), "join")
    return torch.from_numpy(joined).view(place.spec.shape)


def compute_weight(flat: FlatParam, index: int, planes: Planes) -> torch.Tensor:
    """Parameter ``index`` as forward reads it, as an ordinary CPU tensor."""
    place = flat.spec.params[index]
    raw = planes.read(flat, PARAM, place.elem_offset, place.elem_end)
    return torch.from_numpy(raw).view(flat.dtype).view(place.spec.shape)


def give_back(unit: Unit, planes: Planes | None, device: torch.device) -> None:
    """Makes the parameters of ``unit`` ordinary again: with their weights on ``device``, or, without ``planes``, on meta."""
    for flat in unit.flats:
        flat.aliases.clear()
        for index, param in enumerate(flat.params):
            param.__class__ = nn.Parameter
            if planes is None:
                if param.is_meta or param.untyped_storage()._cdata != flat.storage_id:
                    continue
                meta = nn.Parameter(torch.empty(param.shape, dtype=param.dtype, device="meta"), requires_grad=param.requires_grad)
                if weakref.getweakrefs(param):  # it cannot be swapped; so it has its shape, no memory, and no number
                    param.data = torch.full((), math.nan if param.is_floating_point() else 0, dtype=param.dtype).expand(param.shape)
                else:
                    swap_tensors(param, meta)  # type: ignore[no-untyped-call]
            else:
                param.data = compute_weight(flat, index, planes).to(device)


def return_heap() -> None:
    """Gives freed memory of the C heap back to the system, where the C library can (glibc): the weights' old homes, above all."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
