"""The config: DeepSpeed's JSON shape and a few keys of ours, checked whole before any memory is used.

``KEYS`` is the only truth about keys: what each takes, its default, whether it is built, ignored, refused or still to come, and why.
The checker, the nearest-key hints, ``docs/config.md`` and the tests all read it. The models below only give the result its types.

* Everything wrong is in one ``ConfigError``: each problem with its key path, the value, what is allowed and the nearest key.
* ``"auto"`` and an absent key are the same: the default. ``null`` too, for blocks, for keys whose default is nothing, and for keys
  that are not built.
* A key that is refused or still to come may be given the value that leaves it off.
* A bool is not a number; a whole float such as 5e8 is a whole number, because JSON files write them so.

It must not know torch, devices or files: whether a path can be used is checked by ``tiers/``.
"""

from __future__ import annotations

import difflib
import json
import math
import numbers
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, Protocol, TypeAlias

from pydantic import BaseModel, ConfigDict

from infinity.errors import ConfigError, ConfigProblem
from infinity.sizes import BYTES_TEXT, format_bytes, parse_bytes

# ---- the result -------------------------------------------------------------------------------------------------------------------

Placement: TypeAlias = Literal["none", "cpu", "nvme"]
Budget: TypeAlias = int | float | Literal["auto"]
"""Bytes (an int), a fraction of what is free at start (a float up to 1), or "auto"; ``budget_bytes`` turns it into bytes."""


class _Block(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Bf16Block(_Block):
    enabled: bool
    auto_cast: bool


class OptimizerParams(_Block):
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float


class OptimizerBlock(_Block):
    type: Literal["adam", "adamw"]
    params: OptimizerParams


class OffloadParamBlock(_Block):
    device: Placement
    nvme_path: tuple[str, ...] | None
    pin_memory: bool


class OffloadOptimizerBlock(_Block):
    device: Placement
    nvme_path: tuple[str, ...] | None
    pin_memory: bool


class LeafModuleBlock(_Block):
    classes: tuple[str, ...]
    names: tuple[str, ...]


class ZeroOptimizationBlock(_Block):
    stage: Literal[3]
    offload_param: OffloadParamBlock
    offload_optimizer: OffloadOptimizerBlock
    stage3_param_persistence_threshold: int
    stage3_model_persistence_threshold: int
    stage3_max_live_parameters: int
    stage3_prefetch_bucket_size: int
    leaf_module: LeafModuleBlock


class MemoryBlock(_Block):
    device: Budget
    host: Budget


class AioBlock(_Block):
    block_size: int
    queue_depth: int
    in_flight: int
    intra_op_parallelism: int
    backend: Literal["auto", "uring", "libaio", "threads"]
    direct_io: Literal["auto", "required"]
    path_weights: tuple[float, ...] | Literal["auto"]
    stall_s: float


class Config(_Block):
    """A checked config. Attribute paths are those of the JSON; every value is present and of one type.

    The batch triple is resolved for the ``world_size`` it was loaded with. ``notices`` has one line for each key that was accepted
    and ignored.
    """

    train_batch_size: int
    train_micro_batch_size_per_gpu: int
    gradient_accumulation_steps: int
    gradient_clipping: float
    bf16: Bf16Block
    optimizer: OptimizerBlock
    zero_optimization: ZeroOptimizationBlock
    memory: MemoryBlock
    aio: AioBlock
    optimizer_overlap: Literal["auto", "deferred", "fused"]
    optimizer_threads: int | Literal["auto"]
    verify: Literal["write+read", "off"]
    page: int | Literal["auto"]
    notices: tuple[str, ...] = ()

    @property
    def nvme_paths(self) -> tuple[str, ...]:
        """The directories over which pages are spread, or none when nothing rests on NVMe."""
        zero = self.zero_optimization
        for block in (zero.offload_param, zero.offload_optimizer):
            if block.device == "nvme":
                return block.nvme_path or ()
        return ()

    @property
    def pin_memory(self) -> bool:
        """Whether any offloaded state asks for page-locked frames."""
        zero = self.zero_optimization
        return any(block.device != "none" and block.pin_memory for block in (zero.offload_param, zero.offload_optimizer))

    def as_dict(self) -> dict[str, Any]:
        """The resolved config in the shape of the JSON; loading it again gives an equal config (without notices)."""
        return self.model_dump(mode="json", exclude={"notices"})


def budget_bytes(budget: Budget, *, free_bytes: int, useful_bytes: int) -> int:
    """The bytes a budget stands for; "auto" is as much as is useful, at most half of what is free."""
    if isinstance(budget, str):
        return min(useful_bytes, free_bytes // 2)
    if isinstance(budget, float):
        return int(budget * free_bytes)
    return budget


# ---- what a key may take ----------------------------------------------------------------------------------------------------------


class Refusal(ValueError):
    """A value that a key does not take; the text is a hint, or empty. ``reason`` replaces the usual sentence."""

    def __init__(self, hint: str = "", *, reason: str = "") -> None:
        super().__init__(hint or reason)
        self.hint = hint
        self.reason = reason


class Kind(Protocol):
    """What a key takes: ``text`` says it for people, ``read`` gives the value its final type or raises ``Refusal``."""

    @property
    def text(self) -> str: ...

    def read(self, value: object) -> object: ...


@dataclass(frozen=True, slots=True)
class Flag:
    """True or false, nothing that merely looks like it."""

    @property
    def text(self) -> str:
        return "true or false"

    def read(self, value: object) -> bool:
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.strip().lower() in ("true", "false"):
            raise Refusal(f"Write {value.strip().lower()} without quotes.")
        if isinstance(value, int) and value in (0, 1):
            raise Refusal(f"Write {'true' if value else 'false'}.")
        raise Refusal


@dataclass(frozen=True, slots=True)
class Whole:
    """A whole number within [least, most]; ``one_of`` names the only ones allowed, ``later`` those that are not built yet."""

    least: int = 0
    most: int = sys.maxsize
    infinite: bool = False
    one_of: tuple[int, ...] = ()
    later: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        if self.one_of:
            return " or ".join(str(value) for value in self.one_of)
        most = f" and <= {self.most}" if self.most != sys.maxsize else ""
        return f"a whole number >= {self.least}{most}{', or infinity' if self.infinite else ''}"

    def read(self, value: object) -> int | float:
        if isinstance(value, str) and value.strip().lstrip("+-").isdecimal():
            raise Refusal(f"Write {_short(value.strip())} without quotes.")
        if isinstance(value, bool):
            raise Refusal
        if self.infinite and isinstance(value, float) and value == math.inf:
            return value
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, numbers.Integral):
            raise Refusal
        number = int(value)
        if number in self.later:
            raise Refusal(reason=f"not yet; {self.text} is what there is now.")
        if not self.least <= number <= self.most or (self.one_of and number not in self.one_of):
            raise Refusal
        return number


@dataclass(frozen=True, slots=True)
class Number:
    """A finite number >= least and, when given, < below or <= most."""

    least: float = 0.0
    below: float | None = None
    most: float | None = None

    @property
    def text(self) -> str:
        below = f" and < {self.below:g}" if self.below is not None else ""
        most = f" and <= {self.most:g}" if self.most is not None else ""
        return f"a number >= {self.least:g}{below}{most}"

    def read(self, value: object) -> float:
        if isinstance(value, str):
            try:
                float(value)
            except ValueError:
                raise Refusal from None
            raise Refusal(f"Write {_short(value.strip())} without quotes.")
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise Refusal
        try:
            number = float(value)
        except OverflowError:
            raise Refusal from None
        if not math.isfinite(number) or number < self.least:
            raise Refusal
        if (self.below is not None and number >= self.below) or (self.most is not None and number > self.most):
            raise Refusal
        return number


@dataclass(frozen=True, slots=True)
class Numbers:
    """A list of ``count`` numbers."""

    count: int
    each: Number

    @property
    def text(self) -> str:
        return f"a list of {self.count}, each {self.each.text}"

    def read(self, value: object) -> tuple[float, ...]:
        if not isinstance(value, (list, tuple)) or len(value) != self.count:
            raise Refusal
        return tuple(self.each.read(item) for item in value)


@dataclass(frozen=True, slots=True)
class Choice:
    """One of a few words; ``later`` and ``refused`` are words that are known and not taken, with the reason."""

    words: tuple[str, ...]
    later: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    any_case: bool = False

    @property
    def text(self) -> str:
        return " or ".join(f"'{word}'" for word in self.words) if len(self.words) < 3 else f"one of {_quoted(self.words)}"

    def read(self, value: object) -> str:
        if not isinstance(value, str):
            raise Refusal
        word = str.__str__(value)
        folded = word.lower()
        for known in self.words:
            if word == known or (self.any_case and folded == known.lower()):
                return known
        if folded in self.later:
            raise Refusal(reason=f"not yet; {self.text} is what there is now.")
        if folded in self.refused:
            raise Refusal(reason=f"refused: {self.refused[folded]} Use {self.text}.")
        near = _nearest(folded, self.words)
        raise Refusal(f"Did you mean '{near}'?" if near else "")


@dataclass(frozen=True, slots=True)
class Text:
    """Any text that is not empty."""

    @property
    def text(self) -> str:
        return "a text"

    def read(self, value: object) -> str:
        if not isinstance(value, str) or not value:
            raise Refusal
        return str.__str__(value)


@dataclass(frozen=True, slots=True)
class Texts:
    """A list of texts."""

    @property
    def text(self) -> str:
        return "a list of texts"

    def read(self, value: object) -> tuple[str, ...]:
        if isinstance(value, str):
            raise Refusal(f"Write [{_show(value)}].")
        if not isinstance(value, (list, tuple)):
            raise Refusal
        return tuple(Text().read(item) for item in value)


@dataclass(frozen=True, slots=True)
class Weights:
    """A list of numbers above 0, one for each path."""

    @property
    def text(self) -> str:
        return "a list of numbers > 0, one for each path of nvme_path"

    def read(self, value: object) -> tuple[float, ...]:
        if not isinstance(value, (list, tuple)) or not value:
            raise Refusal
        weights = tuple(Number().read(item) for item in value)
        if min(weights) <= 0:
            raise Refusal("Leave a path that is to hold nothing out of nvme_path.")
        return weights


@dataclass(frozen=True, slots=True)
class Directories:
    """A directory by its path, or a list of them; whether they can be used is not checked here."""

    most: int = 16

    @property
    def text(self) -> str:
        return "the path of a directory, or a list of them"

    def read(self, value: object) -> tuple[str, ...]:
        items = value if isinstance(value, (list, tuple)) else [value]
        if not 0 < len(items) <= self.most:
            raise Refusal(f"At most {self.most}." if items else "")
        paths = [self._path(item) for item in items]
        wrong = [f"[{index}]" for index, path in enumerate(paths) if path is None]
        if wrong:
            raise Refusal(f"Not a path: {', '.join(wrong)}." if len(items) > 1 else "")
        found = tuple(path for path in paths if path is not None)
        names = [os.path.normpath(path) for path in found]
        for index, name in enumerate(names):
            if name in names[:index]:
                raise Refusal(reason=f"[{names.index(name)}] and [{index}] are the same directory. Name each once.")
        return found

    def _path(self, value: object) -> str | None:
        if isinstance(value, os.PathLike):
            value = os.fspath(value)
        if not isinstance(value, str) or not value.strip():
            return None
        path = str.__str__(value)
        if "\0" in path:
            raise Refusal("A path cannot contain a NUL character.")
        return os.path.expanduser(path)


@dataclass(frozen=True, slots=True)
class Bytes:
    """A number of bytes within [least, most], a multiple of ``multiple``; with ``power_of_two``, one of those."""

    least: int
    most: int
    multiple: int = 1
    power_of_two: bool = False

    @property
    def text(self) -> str:
        which = ", a power of two" if self.power_of_two else f", a multiple of {self.multiple}" if self.multiple > 1 else ""
        return f"{BYTES_TEXT}, from {format_bytes(self.least)} to {format_bytes(self.most)}{which}"

    def read(self, value: object) -> int:
        nbytes = _bytes(value)
        if not self.least <= nbytes <= self.most or nbytes % self.multiple or (self.power_of_two and nbytes & (nbytes - 1)):
            raise Refusal
        return nbytes


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Bytes, or a fraction of what is free at start."""

    least: int = 4096

    @property
    def text(self) -> str:
        return "a size such as '2GB' or 536870912, a fraction of what is free at start such as 0.5, or 'auto'"

    def read(self, value: object) -> int | float:
        if isinstance(value, float) and 0.0 < value <= 1.0:
            return float(value)
        if isinstance(value, str) and value.strip().startswith(("0.", ".")):
            raise Refusal(f"Write {_short(value.strip())} without quotes.")
        nbytes = _bytes(value)
        if nbytes < self.least:
            raise Refusal(f"The least is {format_bytes(self.least)}; 1.0 is all that is free.")
        return nbytes


@dataclass(frozen=True, slots=True)
class Anything:
    """A value of a key that is not built: only whether it is switched off matters."""

    @property
    def text(self) -> str:
        return "off"

    def read(self, value: object) -> object:
        return value


@dataclass(frozen=True, slots=True)
class Block:
    """An object with keys of its own.

    ``switch`` names the key in it that turns it on; without one, being there turns it on. It matters only for blocks that are not built.
    """

    switch: str | None = None

    @property
    def text(self) -> str:
        return "a block"

    def read(self, value: object) -> object:
        raise Refusal


def _bytes(value: object) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        value = int(value)
    if not isinstance(value, (int, str)):
        raise Refusal
    try:
        nbytes = parse_bytes(value)
    except ValueError:
        raise Refusal from None
    if nbytes > sys.maxsize:
        raise Refusal
    return nbytes


# ---- the table of keys ------------------------------------------------------------------------------------------------------------


class Verdict(Enum):
    """What becomes of a key."""

    BUILT = "built"
    IGNORED = "ignored"
    REFUSED = "refused"
    LATER = "not yet"
    PART = "with its block"


BUILT, IGNORED, REFUSED, LATER, PART = Verdict


@dataclass(frozen=True, slots=True)
class Key:
    """One row. ``text`` says what the key does (BUILT), why it is not needed (IGNORED), why not (REFUSED) or what to do now (LATER).

    ``off`` are values that ask for nothing, besides the default: accepted without a word. ``becomes`` are the keys that an old spelling
    sets. PART is a key of a block that is not built: its name and type are checked, the block's own row says the rest.
    """

    path: str
    takes: Kind
    default: object
    verdict: Verdict
    text: str = ""
    off: tuple[object, ...] = ()
    aliases: tuple[str, ...] = ()
    becomes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def block(self) -> str:
        return self.path.rpartition(".")[0]


_FLAG = Flag()
_COUNT = Whole()
_SIZE = Whole(1)
_SHARE = Number(0.0, most=1.0)
_TEXT = Text()
_TEXTS = Texts()
_OPEN = Anything()
_ALWAYS = "this is always so"
_ONE_RANK = "one rank sends nothing to others"
_BY_BUDGET = "frames are sized from memory.host and the page size"
_NVME_PATH = "where files go; needed for 'nvme'; pages are striped over several (one per drive), the same for both blocks"
_NOT_OURS = "nothing here sends figures there; the command line's --metrics writes one JSON line per step"

KEYS: tuple[Key, ...] = (
    # -- batch
    Key(
        "train_batch_size",
        _SIZE,
        None,
        BUILT,
        "samples per step over all ranks: micro batch x accumulation x ranks; any two give the third",
    ),
    Key("train_micro_batch_size_per_gpu", _SIZE, None, BUILT, "samples in one forward of one rank"),
    Key("gradient_accumulation_steps", _SIZE, None, BUILT, "forward and backward passes per step; 1 where the batch sizes leave it open"),
    Key("gradient_clipping", Number(), 0.0, BUILT, "largest global L2 norm of the gradient; 0: no clipping"),
    Key("managed_gradient_accumulation", _FLAG, True, LATER, "steps come after gradient_accumulation_steps micro-steps"),
    Key("prescale_gradients", _FLAG, False, IGNORED, _ONE_RANK, off=(False,)),
    Key("gradient_predivide_factor", Number(), 1.0, IGNORED, _ONE_RANK, off=(1.0,)),
    Key("gradient_allreduce_op", Choice(("mean", "sum"), any_case=True), "mean", LATER, "gradients are averaged over ranks"),
    Key("sparse_gradients", _FLAG, False, REFUSED, "stage 3 has dense gradients only"),
    Key("communication_data_type", _TEXT, None, IGNORED, _ONE_RANK),
    Key("seq_parallel_communication_data_type", _TEXT, None, IGNORED, _ONE_RANK),
    Key("disable_allgather", _FLAG, False, IGNORED, "a switch for debugging DeepSpeed", off=(False,)),
    Key("dataloader_drop_last", _FLAG, False, LATER, "set drop_last on a DataLoader of your own"),
    # -- precision
    Key("bf16", Block(), {}, BUILT, "bfloat16 training; fp32 master weights are kept exactly", aliases=("bfloat16",)),
    Key("bf16.enabled", _FLAG, False, BUILT, "cast every floating parameter to bfloat16; buffers keep their dtype"),
    Key("bf16.auto_cast", _FLAG, False, BUILT, "cast floating inputs of the model to bfloat16"),
    Key("bf16.check_grad_overflow", _FLAG, False, LATER, "a step with a non-finite gradient does what torch does"),
    Key("bf16.immediate_grad_update", _FLAG, False, IGNORED, "gradients are always taken as they arrive"),
    Key("bf16.bf16_master_weights_and_grads", _FLAG, False, LATER, "masters are fp32"),
    Key("bf16.bf16_optimizer_states", _FLAG, False, LATER, "moments are fp32"),
    Key("check_grad_overflow", _FLAG, False, LATER, "a step with a non-finite gradient does what torch does"),
    Key("fp16", Block(switch="enabled"), {}, LATER, "use bf16"),
    Key("fp16.enabled", _FLAG, False, LATER, "use bf16"),
    Key("fp16.auto_cast", _FLAG, False, PART),
    Key("fp16.loss_scale", Number(), 0.0, PART),
    Key("fp16.initial_scale_power", _COUNT, 16, PART),
    Key("fp16.loss_scale_window", _SIZE, 1000, PART),
    Key("fp16.hysteresis", _COUNT, 2, PART),
    Key("fp16.consecutive_hysteresis", _FLAG, False, PART),
    Key("fp16.min_loss_scale", Number(), 1.0, PART),
    Key("fp16.fp16_master_weights_and_grads", _FLAG, False, PART),
    Key("amp", _OPEN, None, REFUSED, "Apex is no longer maintained; use bf16"),
    Key("torch_autocast", Block(switch="enabled"), {}, LATER, "use bf16, or torch.autocast around your own forward"),
    Key("torch_autocast.enabled", _FLAG, False, LATER, "use bf16, or torch.autocast around your own forward"),
    Key("torch_autocast.dtype", _TEXT, None, PART),
    Key("torch_autocast.lower_precision_safe_modules", _TEXTS, (), PART),
    Key("data_types", Block(), {}, BUILT, "dtypes of what is not a weight"),
    Key(
        "data_types.grad_accum_dtype",
        Choice(("fp32", "float32", "float", "bf16", "fp16"), any_case=True),
        None,
        LATER,
        "gradients are summed in fp32",
        off=("fp32", "float32", "float"),
    ),
    Key("data_types.param_dtype", _TEXT, None, LATER, "use bf16.enabled, or cast the model"),
    Key("data_types.buffer_dtype", _TEXT, None, LATER, "buffers keep their dtype"),
    # -- optimizer and scheduler
    Key("optimizer", Block(), {}, BUILT, "AdamW with decoupled weight decay, bit for bit torch's AdamW(fused=True) in fp32"),
    Key(
        "optimizer.type",
        Choice(
            ("adam", "adamw"),
            any_case=True,
            later=("adagrad", "lion", "sgd", "rmsprop"),
            refused={
                "muon": "it needs whole matrices, and the update here is element by element.",
                "lamb": "it needs the norm of whole layers before the update.",
                "onebitadam": "it changes the arithmetic to save communication.",
                "zerooneadam": "it changes the arithmetic to save communication.",
                "onebitlamb": "it changes the arithmetic to save communication.",
                "muadam": "scale the learning rates of the parameter groups instead.",
                "muadamw": "scale the learning rates of the parameter groups instead.",
                "musgd": "scale the learning rates of the parameter groups instead.",
            },
        ),
        "adamw",
        BUILT,
        "which optimizer; both names mean decoupled decay, as in DeepSpeed",
    ),
    Key("optimizer.params", Block(), {}, BUILT, "what every parameter group has unless it says otherwise"),
    Key("optimizer.params.lr", Number(), 1e-3, BUILT, "learning rate"),
    Key("optimizer.params.betas", Numbers(2, Number(0.0, below=1.0)), (0.9, 0.999), BUILT, "decay of the first and second moment"),
    Key("optimizer.params.eps", Number(), 1e-8, BUILT, "added to the root of the second moment"),
    Key("optimizer.params.weight_decay", Number(), 0.0, BUILT, "decoupled weight decay; DeepSpeed's default 0, not torch's 0.01"),
    Key("optimizer.params.adam_w_mode", _FLAG, True, REFUSED, "decay added to the gradient is not offered; weight decay is decoupled"),
    Key("optimizer.params.torch_adam", _FLAG, False, IGNORED, "the arithmetic is torch's either way", off=(False,)),
    Key("optimizer.params.fp32_optimizer_states", _FLAG, True, LATER, "moments are fp32"),
    Key("optimizer.params.bias_correction", _FLAG, True, REFUSED, "AdamW without bias correction is another optimizer"),
    Key("optimizer.params.amsgrad", _FLAG, False, REFUSED, "it needs a third moment"),
    Key("optimizer.params.max_grad_norm", Number(), None, REFUSED, "clipping belongs to the whole run: use gradient_clipping", off=(0.0,)),
    Key("optimizer.params.muon_lr", Number(), None, REFUSED, "it belongs to Muon, which is not offered"),
    Key("optimizer.params.adam_lr", Number(), None, REFUSED, "it belongs to Muon, which is not offered; use lr"),
    Key("optimizer.params.momentum", Number(), None, REFUSED, "AdamW has betas instead", off=(0.0,)),
    Key("optimizer.params.ns_method", _TEXT, None, REFUSED, "it belongs to Muon, which is not offered"),
    Key("optimizer.legacy_fusion", _FLAG, False, IGNORED, "the update is one kernel either way", off=(False,)),
    Key("zero_allow_untested_optimizer", _FLAG, False, IGNORED, "optimizers are known by name"),
    Key("zero_force_ds_cpu_optimizer", _FLAG, True, IGNORED, "the update always runs in the optimizer of this package"),
    Key("scheduler", Block(switch="type"), {}, LATER, "use a torch.optim.lr_scheduler on engine.optimizer"),
    Key("scheduler.type", _TEXT, None, LATER, "use a torch.optim.lr_scheduler on engine.optimizer"),
    Key("scheduler.params", Block(), {}, PART),
    Key("scheduler.params.last_batch_iteration", Whole(-1), -1, PART),
    Key("scheduler.params.lr_range_test_min_lr", _OPEN, 1e-3, PART),
    Key("scheduler.params.lr_range_test_step_size", _SIZE, 2000, PART),
    Key("scheduler.params.lr_range_test_step_rate", Number(), 1.0, PART),
    Key("scheduler.params.lr_range_test_staircase", _FLAG, False, PART),
    Key("scheduler.params.cycle_min_lr", _OPEN, None, PART),
    Key("scheduler.params.cycle_max_lr", _OPEN, None, PART),
    Key("scheduler.params.decay_lr_rate", Number(), 0.0, PART),
    Key("scheduler.params.cycle_first_step_size", _SIZE, 2000, PART),
    Key("scheduler.params.cycle_second_step_size", _SIZE, None, PART),
    Key("scheduler.params.cycle_first_stair_count", _COUNT, 0, PART),
    Key("scheduler.params.cycle_second_stair_count", _COUNT, None, PART),
    Key("scheduler.params.decay_step_size", _COUNT, 0, PART),
    Key("scheduler.params.cycle_momentum", _FLAG, True, PART),
    Key("scheduler.params.cycle_min_mom", Number(), 0.8, PART),
    Key("scheduler.params.cycle_max_mom", Number(), 0.9, PART),
    Key("scheduler.params.decay_mom_rate", Number(), 0.0, PART),
    Key("scheduler.params.warmup_min_lr", _OPEN, 0.0, PART),
    Key("scheduler.params.warmup_max_lr", _OPEN, None, PART),
    Key("scheduler.params.warmup_num_steps", _COUNT, 1000, PART),
    Key("scheduler.params.warmup_type", _TEXT, "log", PART),
    Key("scheduler.params.total_num_steps", _SIZE, None, PART),
    Key("scheduler.params.warmup_min_ratio", _SHARE, 0.0, PART),
    Key("scheduler.params.cos_min_ratio", _SHARE, 1e-4, PART),
    # -- zero_optimization
    Key("zero_optimization", Block(), {}, BUILT, "what is cut up, and where it may rest"),
    Key(
        "zero_optimization.stage",
        Whole(one_of=(3,), later=(0, 1, 2)),
        3,
        BUILT,
        "parameters, gradients and optimizer state are all sharded",
    ),
    Key("zero_optimization.offload_param", Block(), {}, BUILT, "the parameters"),
    Key("zero_optimization.offload_param.device", Choice(("none", "cpu", "nvme")), "none", BUILT, "the lowest tier where weights may rest"),
    Key("zero_optimization.offload_param.nvme_path", Directories(), None, BUILT, _NVME_PATH),
    Key("zero_optimization.offload_param.pin_memory", _FLAG, True, BUILT, "page-lock host frames for copies to a GPU; nothing on a CPU"),
    Key("zero_optimization.offload_param.buffer_count", _SIZE, 5, IGNORED, _BY_BUDGET),
    Key("zero_optimization.offload_param.buffer_size", _SIZE, 100_000_000, IGNORED, _BY_BUDGET),
    Key(
        "zero_optimization.offload_param.max_in_cpu",
        _COUNT,
        1_000_000_000,
        LATER,
        "memory.host says in bytes how much host memory may hold",
    ),
    Key("zero_optimization.offload_optimizer", Block(), {}, BUILT, "the optimizer state: residuals or masters, and moments"),
    Key("zero_optimization.offload_optimizer.device", Choice(("none", "cpu", "nvme")), "none", BUILT, "the lowest tier where it may rest"),
    Key("zero_optimization.offload_optimizer.nvme_path", Directories(), None, BUILT, _NVME_PATH),
    Key(
        "zero_optimization.offload_optimizer.pin_memory", _FLAG, True, BUILT, "page-lock host frames for copies to a GPU; nothing on a CPU"
    ),
    Key("zero_optimization.offload_optimizer.buffer_count", _SIZE, 4, IGNORED, _BY_BUDGET),
    Key("zero_optimization.offload_optimizer.pipeline_read", _FLAG, False, IGNORED, "reads always run ahead"),
    Key("zero_optimization.offload_optimizer.pipeline_write", _FLAG, False, IGNORED, "writes always run behind"),
    Key("zero_optimization.offload_optimizer.fast_init", _FLAG, False, IGNORED, "state is always written unit by unit"),
    Key("zero_optimization.offload_optimizer.ratio", _SHARE, 1.0, LATER, "the whole update runs where optimizer state rests"),
    Key(
        "zero_optimization.offload_optimizer.super_offload",
        _FLAG,
        False,
        IGNORED,
        "optimizer_overlap says when the update runs",
        off=(False,),
    ),
    Key("zero_optimization.offload_optimizer.cpuadam_cores_perc", _SHARE, 0.8, IGNORED, "optimizer_threads says how many threads update"),
    Key(
        "zero_optimization.stage3_param_persistence_threshold",
        _COUNT,
        100_000,
        BUILT,
        "a unit whose parameters all have fewer elements than this stays on the device",
        aliases=("param_persistence_threshold",),
    ),
    Key(
        "zero_optimization.stage3_model_persistence_threshold",
        _COUNT,
        sys.maxsize,
        BUILT,
        "at most this many elements stay on the device for good",
        aliases=("model_persistence_threshold",),
    ),
    Key(
        "zero_optimization.stage3_max_live_parameters",
        _COUNT,
        1_000_000_000,
        BUILT,
        "how many gathered elements gathering ahead may reach",
        aliases=("max_live_parameters",),
    ),
    Key(
        "zero_optimization.stage3_prefetch_bucket_size",
        _COUNT,
        50_000_000,
        BUILT,
        "how many elements gathers may run ahead",
        aliases=("prefetch_bucket_size",),
    ),
    Key(
        "zero_optimization.stage3_max_reuse_distance",
        _COUNT,
        1_000_000_000,
        IGNORED,
        "what stays gathered follows from memory.device",
        aliases=("max_reuse_distance",),
    ),
    Key("zero_optimization.leaf_module", Block(), {}, BUILT, "modules whose whole subtree is one unit"),
    Key("zero_optimization.leaf_module.classes", _TEXTS, (), BUILT, "by class name"),
    Key("zero_optimization.leaf_module.names", _TEXTS, (), BUILT, "by the module's dotted name"),
    Key("zero_optimization.leaf_module.name_suffixes", _TEXTS, (), LATER, "use classes or names"),
    Key(
        "zero_optimization.stage3_module_granularity_threshold",
        _COUNT,
        0,
        LATER,
        "use leaf_module",
        aliases=("module_granularity_threshold",),
    ),
    Key("zero_optimization.sub_group_size", _SIZE, 1_000_000_000, IGNORED, "tiles follow from the page size; a tensor may span many"),
    Key("zero_optimization.contiguous_gradients", _FLAG, True, IGNORED, _ALWAYS),
    Key("zero_optimization.reduce_scatter", _FLAG, True, IGNORED, _ALWAYS),
    Key("zero_optimization.reduce_bucket_size", _SIZE, 500_000_000, IGNORED, "gradients are reduced unit by unit"),
    Key("zero_optimization.use_multi_rank_bucket_allreduce", _FLAG, True, IGNORED, "it is about stages 1 and 2"),
    Key("zero_optimization.allgather_partitions", _FLAG, True, IGNORED, "it is about stages 1 and 2"),
    Key("zero_optimization.allgather_bucket_size", _SIZE, 500_000_000, IGNORED, "it is about stages 1 and 2"),
    Key("zero_optimization.overlap_comm", _FLAG, None, IGNORED, _ONE_RANK),
    Key("zero_optimization.load_from_fp32_weights", _FLAG, True, LATER, "there is no loading yet"),
    Key("zero_optimization.elastic_checkpoint", _FLAG, False, REFUSED, "it is a format of old; checkpoints here fit any number of ranks"),
    Key(
        "zero_optimization.stage3_gather_16bit_weights_on_model_save",
        _FLAG,
        False,
        LATER,
        "engine.close() gives the trained weights back to the module",
        aliases=("gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save"),
    ),
    Key(
        "zero_optimization.stage3_use_all_reduce_for_fetch_params",
        _FLAG,
        False,
        IGNORED,
        _ONE_RANK,
        aliases=("use_all_reduce_for_fetch_params",),
    ),
    Key("zero_optimization.stage3_allgather_sequential", _FLAG, False, IGNORED, _ONE_RANK, aliases=("allgather_sequential",)),
    Key("zero_optimization.ignore_unused_parameters", _FLAG, True, LATER, "a parameter without a gradient is left alone, as torch does"),
    Key("zero_optimization.legacy_stage1", _FLAG, False, REFUSED, "it was removed from DeepSpeed"),
    Key("zero_optimization.round_robin_gradients", _FLAG, False, IGNORED, "it is about stages 1 and 2"),
    Key("zero_optimization.zero_hpz_partition_size", _COUNT, 1, LATER, "there is one copy of each weight", off=(0,)),
    Key("zero_optimization.zero_quantized_weights", _FLAG, False, REFUSED, "it changes the numbers"),
    Key("zero_optimization.zero_quantized_nontrainable_weights", _FLAG, False, REFUSED, "it changes the numbers"),
    Key("zero_optimization.zero_quantized_gradients", _FLAG, False, REFUSED, "it changes the numbers"),
    Key("zero_optimization.zeropp_loco_param", _OPEN, None, REFUSED, "it belongs to quantised gradients, which change the numbers"),
    Key("zero_optimization.mics_shard_size", Whole(-1), -1, REFUSED, "state is cut over all ranks"),
    Key("zero_optimization.mics_hierarchical_params_gather", _FLAG, False, REFUSED, "it belongs to MiCS, which is not offered"),
    Key(
        "zero_optimization.memory_efficient_linear", _FLAG, True, IGNORED, "no function of torch is replaced; weights are never saved twice"
    ),
    Key("zero_optimization.pipeline_loading_checkpoint", _FLAG, False, IGNORED, "state is always moved unit by unit"),
    Key("zero_optimization.override_module_apply", _FLAG, True, IGNORED, "a released parameter is gathered when it is touched"),
    Key("zero_optimization.log_trace_cache_warnings", _FLAG, False, IGNORED, "a change of the order is always logged once"),
    Key("zero_optimization.enable_sanity_checks", _FLAG, False, IGNORED, "one rank has nothing to compare"),
    Key("zero_optimization.save_muon_momentum_buffer_in_memory", _FLAG, False, REFUSED, "it belongs to Muon, which is not offered"),
    Key(
        "zero_optimization.cpu_offload",
        _FLAG,
        None,
        BUILT,
        "old spelling of offload_optimizer: {device: cpu}",
        becomes=("zero_optimization.offload_optimizer.device",),
    ),
    Key(
        "zero_optimization.cpu_offload_param",
        _FLAG,
        None,
        BUILT,
        "old spelling of offload_param: {device: cpu}",
        becomes=("zero_optimization.offload_param.device",),
    ),
    Key(
        "zero_optimization.cpu_offload_use_pin_memory",
        _FLAG,
        None,
        BUILT,
        "old spelling of pin_memory in both offload blocks",
        becomes=("zero_optimization.offload_param.pin_memory", "zero_optimization.offload_optimizer.pin_memory"),
    ),
    Key("zero_optimization.zenflow", Block(), {}, REFUSED, "ZenFlow changes the numbers; the overlapped update here is exact"),
    Key("zero_optimization.zenflow.topk_ratio", _SHARE, 0.1, PART),
    Key("zero_optimization.zenflow.select_strategy", _TEXT, "auto", PART),
    Key("zero_optimization.zenflow.select_interval", _OPEN, "auto", PART),
    Key("zero_optimization.zenflow.update_interval", _OPEN, "auto", PART),
    Key("zero_optimization.zenflow.overlap_step", _FLAG, False, PART),
    Key("zero_optimization.zenflow.offload", _FLAG, False, PART),
    Key("zero_optimization.zenflow.auto_ratio", _SHARE, 0.99, PART),
    Key("zero_optimization.zenflow.full_warm_up_rounds", _COUNT, 0, PART),
    Key("zero_optimization.zenflow.pt_reserved_cores_perc", _SHARE, 0.5, PART),
    Key("zero_optimization.zenflow.steps_per_epoch", _COUNT, None, PART),
    # -- ours
    Key("memory", Block(), {}, BUILT, "how many bytes of the faster tiers may be used; what stays where follows from it"),
    Key(
        "memory.device",
        MemoryBudget(),
        "auto",
        BUILT,
        "gathered units, gradients, staging and what never leaves the device; auto: what is useful, at most half of what is free",
    ),
    Key("memory.host", MemoryBudget(), "auto", BUILT, "frames and native staging; auto: what is useful, at most half of what is free"),
    Key(
        "optimizer_overlap",
        Choice(("auto", "deferred", "fused"), later=("speculative",)),
        "auto",
        BUILT,
        "when the update runs: 'fused' inside backward, 'deferred' in step(), 'auto' fused where that is exact",
    ),
    Key("optimizer_threads", Whole(1, 1024), "auto", BUILT, "native threads that update, check and copy; auto: by the number of cores"),
    Key(
        "verify", Choice(("write+read", "off")), "write+read", BUILT, "checksum each page when it is written, and check it when it is read"
    ),
    Key(
        "page",
        Bytes(4 << 10, 8 << 20, power_of_two=True),
        "auto",
        BUILT,
        "atom of host memory, I/O and checksums; auto: by the model and memory.host",
    ),
    # -- aio
    Key("aio", Block(), {}, BUILT, "how files are read and written"),
    Key("aio.block_size", Bytes(4 << 10, 1 << 30, multiple=4 << 10), 1 << 20, BUILT, "the largest single request to the kernel"),
    Key("aio.queue_depth", Whole(1, 4096), 32, BUILT, "requests in flight, for each path"),
    Key("aio.in_flight", Bytes(64 << 10, 1 << 40), 256 << 20, BUILT, "bytes of requests in flight at most, for each path"),
    Key(
        "aio.intra_op_parallelism", Whole(1, 256), 4, BUILT, "I/O threads of the 'threads' backend", aliases=("thread_count", "num_threads")
    ),
    Key(
        "aio.backend",
        Choice(("auto", "uring", "libaio", "threads")),
        "auto",
        BUILT,
        "what moves the bytes; auto: the best that works",
    ),
    Key(
        "aio.direct_io",
        Choice(("auto", "required")),
        "auto",
        BUILT,
        "past the page cache (O_DIRECT); auto: where the file system does it, else one warning; required: refused where it does not",
    ),
    Key(
        "aio.path_weights",
        Weights(),
        "auto",
        BUILT,
        "how many pages each path of nvme_path gets, relative to the others; auto: by the speed measured at start",
    ),
    Key("aio.stall_s", Number(1.0), 600.0, BUILT, "seconds without any progress after which waiting for I/O is an error"),
    Key("aio.single_submit", _FLAG, False, IGNORED, "requests are submitted together"),
    Key("aio.overlap_events", _FLAG, True, IGNORED, "the queue is always kept full"),
    Key("aio.use_gds", _FLAG, False, LATER, "pages pass through host memory"),
    # -- activation checkpointing
    Key("activation_checkpointing", Block(), {}, BUILT, "for deepspeed.checkpointing; use torch.utils.checkpoint in the model"),
    Key("activation_checkpointing.partition_activations", _FLAG, False, IGNORED, "it is about tensor parallelism"),
    Key("activation_checkpointing.cpu_checkpointing", _FLAG, False, LATER, "use torch.autograd.graph.save_on_cpu around the forward"),
    Key("activation_checkpointing.contiguous_memory_optimization", _FLAG, False, IGNORED, "saved inputs are torch's"),
    Key("activation_checkpointing.number_checkpoints", _COUNT, None, IGNORED, "saved inputs are torch's"),
    Key("activation_checkpointing.synchronize_checkpoint_boundary", _FLAG, False, IGNORED, "nothing needs it"),
    Key("activation_checkpointing.profile", _FLAG, False, IGNORED, "the command line's --metrics writes times per step"),
    # -- checkpoint
    Key("checkpoint", Block(), {}, BUILT, "saving and loading, which are not there yet"),
    Key("checkpoint.tag_validation", Choice(("Ignore", "Warn", "Fail"), any_case=True), "Warn", IGNORED, "one rank has one tag"),
    Key("checkpoint.load_universal", _FLAG, False, LATER, "there is no loading yet"),
    Key("checkpoint.use_node_local_storage", _FLAG, False, LATER, "there is no saving yet"),
    Key("checkpoint.checkpoint_serialization", _FLAG, True, IGNORED, "it is about DeepSpeed's writer"),
    Key("checkpoint.parallel_write", Block(), {}, BUILT, "for pipeline parallelism"),
    Key("checkpoint.parallel_write.pipeline_stage", _FLAG, False, IGNORED, "it is about pipeline parallelism"),
    Key("checkpoint.writer", Block(), {}, IGNORED, "it is about DeepSpeed's writer"),
    Key("checkpoint.writer.type", _TEXT, "FAST", PART),
    Key("checkpoint.writer.decoupled", _FLAG, False, PART),
    Key("checkpoint.writer.io_buffer_size", _SIZE, 64 << 20, PART),
    Key("checkpoint.writer.io_buffer_double", _FLAG, True, PART),
    Key("checkpoint.writer.show_statistics", _FLAG, False, PART),
    Key("checkpoint.writer.data_parallel", _TEXT, None, PART),
    Key("checkpoint.writer.io_multiplier", _SIZE, 1, PART),
    Key("nebula", _OPEN, None, REFUSED, "it is a service of its own"),
    Key("datastates_ckpt", _OPEN, None, REFUSED, "it is an engine of its own"),
    # -- what is printed and measured
    Key(
        "steps_per_print", Whole(1, infinite=True), None, IGNORED, "libraries do not print; the command line's --metrics writes every step"
    ),
    Key("wall_clock_breakdown", _FLAG, False, IGNORED, "times per step are always counted", off=(False,)),
    Key("memory_breakdown", _FLAG, False, IGNORED, "bytes per tier are always counted", off=(False,)),
    Key("dump_state", _FLAG, False, IGNORED, "libraries do not print", off=(False,)),
    Key("log_level", _TEXT, None, IGNORED, "set the level of the logger 'infinity'"),
    Key("timers", Block(), {}, BUILT, "DeepSpeed's timers"),
    Key("timers.throughput", Block(), {}, IGNORED, "times per step are always counted, and nothing is synchronised for it"),
    Key("timers.throughput.enabled", _FLAG, True, PART),
    Key("timers.throughput.synchronized", _FLAG, True, PART),
    Key("comms_logger", Block(switch="enabled"), {}, IGNORED, _ONE_RANK),
    Key("comms_logger.enabled", _FLAG, False, IGNORED, _ONE_RANK, off=(False,)),
    Key("comms_logger.verbose", _FLAG, False, PART),
    Key("comms_logger.prof_all", _FLAG, True, PART),
    Key("comms_logger.debug", _FLAG, False, PART),
    Key("comms_logger.prof_ops", _TEXTS, (), PART),
    Key("flops_profiler", Block(switch="enabled"), {}, IGNORED, "use torch.utils.flop_counter"),
    Key("flops_profiler.enabled", _FLAG, False, IGNORED, "use torch.utils.flop_counter", off=(False,)),
    Key("flops_profiler.recompute_fwd_factor", Number(), 0.0, PART),
    Key("flops_profiler.profile_step", _COUNT, 1, PART),
    Key("flops_profiler.module_depth", Whole(-1), -1, PART),
    Key("flops_profiler.top_modules", _COUNT, 1, PART),
    Key("flops_profiler.detailed", _FLAG, True, PART),
    Key("flops_profiler.output_file", _TEXT, None, PART),
    Key("tensorboard", Block(switch="enabled"), {}, LATER, _NOT_OURS),
    Key("tensorboard.enabled", _FLAG, False, LATER, _NOT_OURS),
    Key("tensorboard.output_path", _OPEN, "", PART),
    Key("tensorboard.job_name", _TEXT, None, PART),
    Key("csv_monitor", Block(switch="enabled"), {}, LATER, _NOT_OURS),
    Key("csv_monitor.enabled", _FLAG, False, LATER, _NOT_OURS),
    Key("csv_monitor.output_path", _OPEN, "", PART),
    Key("csv_monitor.job_name", _TEXT, None, PART),
    Key("wandb", Block(switch="enabled"), {}, IGNORED, _NOT_OURS),
    Key("wandb.enabled", _FLAG, False, IGNORED, _NOT_OURS, off=(False,)),
    Key("wandb.group", _TEXT, None, PART),
    Key("wandb.team", _TEXT, None, PART),
    Key("wandb.project", _TEXT, None, PART),
    Key("comet", Block(switch="enabled"), {}, IGNORED, _NOT_OURS),
    Key("comet.enabled", _FLAG, False, IGNORED, _NOT_OURS, off=(False,)),
    Key("comet.samples_log_interval", _SIZE, 100, PART),
    Key("comet.project", _TEXT, None, PART),
    Key("comet.workspace", _TEXT, None, PART),
    Key("comet.api_key", _TEXT, None, PART),
    Key("comet.experiment_name", _TEXT, None, PART),
    Key("comet.experiment_key", _TEXT, None, PART),
    Key("comet.online", _FLAG, None, PART),
    Key("comet.mode", _TEXT, None, PART),
    # -- compile
    Key("compile", Block(switch="deepcompile"), {}, REFUSED, "DeepCompile rewrites the graph; use torch.compile's own options"),
    Key(
        "compile.deepcompile", _FLAG, False, REFUSED, "DeepCompile rewrites the graph; what stays resident here follows from memory.device"
    ),
    Key("compile.free_activation", _FLAG, False, PART),
    Key("compile.free_activation_threshold", _COUNT, 10 << 20, PART),
    Key("compile.offload_activation", _FLAG, False, PART),
    Key("compile.offload_activation_pin_memory", _FLAG, True, PART),
    Key("compile.offload_opt_states", _FLAG, False, PART),
    Key("compile.double_buffer", _FLAG, True, PART),
    Key("compile.symmetric_memory", _FLAG, False, PART),
    Key("compile.debug_log", _FLAG, False, PART),
    Key("compile.offload_parameters", _FLAG, False, PART),
    Key("compile.sync_before_reduce", _FLAG, False, PART),
    Key("compile.sync_after_reduce", _FLAG, False, PART),
    Key("compile.sync_before_allgather", _FLAG, False, PART),
    Key("compile.sync_after_allgather", _FLAG, False, PART),
    Key("compile.keep_int_input_tensors", _FLAG, True, PART),
    Key("compile.keep_all_input_tensors", _FLAG, False, PART),
    Key("compile.passes", _TEXTS, None, PART),
    # -- the rest of DeepSpeed
    Key(
        "tensor_parallel", _OPEN, None, REFUSED, "state is cut over data-parallel ranks only", off=({"autotp_size": 0}, {"autotp_size": 1})
    ),
    Key("expert_parallel", _OPEN, None, REFUSED, "state is cut over data-parallel ranks only", off=(0, 1)),
    Key("sequence_parallel_size", _COUNT, 1, REFUSED, "state is cut over data-parallel ranks only", off=(0,)),
    Key("data_parallel_size", _COUNT, 1, REFUSED, "it follows from the number of ranks", off=(0,)),
    Key("use_data_before_expert_parallelism", _FLAG, False, REFUSED, "it belongs to expert parallelism, which is not offered"),
    Key("pipeline", _OPEN, None, REFUSED, "pipeline parallelism is not offered"),
    Key("hybrid_engine", _OPEN, None, REFUSED, "there is one engine, for training and evaluation"),
    Key("sparse_attention", _OPEN, None, REFUSED, "attention belongs to the model"),
    Key("progressive_layer_drop", _OPEN, None, REFUSED, "it changes the model"),
    Key("eigenvalue", _OPEN, None, REFUSED, "it belongs to quantised training, which is not offered"),
    Key("quantize_training", _OPEN, None, REFUSED, "it changes the numbers"),
    Key("compression_training", _OPEN, None, REFUSED, "it changes the model"),
    Key("weight_quantization", _OPEN, None, REFUSED, "it changes the numbers"),
    Key("curriculum_learning", _OPEN, None, REFUSED, "the order of the data belongs to the data loader"),
    Key("data_efficiency", _OPEN, None, REFUSED, "the order of the data belongs to the data loader"),
    Key("elasticity", _OPEN, None, REFUSED, "the batch is what the config says"),
    Key("autotuning", _OPEN, None, REFUSED, "it starts other runs of the same script"),
    Key("graph_harvesting", _FLAG, False, REFUSED, "CUDA graphs would fix addresses that move here"),
    Key("vocabulary_size", _SIZE, None, IGNORED, "it only warns about sizes that are slow"),
    Key("allgather_size", _SIZE, 500_000_000, IGNORED, "it is about stage 1"),
)


def _names(keys: tuple[Key, ...]) -> dict[str, dict[str, Key]]:
    """For each block the names that may stand in it, aliases included."""
    blocks: dict[str, dict[str, Key]] = {"": {}}
    for key in keys:
        if isinstance(key.takes, Block):
            blocks[key.path] = {}
        for name in (key.name, *key.aliases):
            blocks[key.block][name] = key
    return blocks


def _homes(keys: tuple[Key, ...]) -> dict[str, list[str]]:
    """For each name the blocks in which it belongs; keys of blocks that are not built are left out."""
    homes: dict[str, list[str]] = {}
    for key in keys:
        if key.verdict is not PART:
            for name in (key.name, *key.aliases):
                homes.setdefault(name, []).append(key.block)
    return homes


_BY_PATH: dict[str, Key] = {key.path: key for key in KEYS}
_NAMES = _names(KEYS)
_HOMES = _homes(KEYS)


# ---- reading ----------------------------------------------------------------------------------------------------------------------


def load_config(
    source: Mapping[str, Any] | str | os.PathLike[str] | Config,
    *,
    world_size: int = 1,
    check_paths: Callable[[Sequence[str]], Sequence[str | None]] | None = None,
) -> Config:
    """The checked config from a dict, the path of a JSON file, or a JSON text (one that starts with ``{``).

    ``check_paths`` says what is wrong with each directory that is to be used, or None; without it directories are not looked at.
    Errors: one ``ConfigError`` with every problem.
    """
    reading = _Reading()
    tree = source.as_dict() if isinstance(source, Config) else _tree(source, reading)
    if tree is not None:
        reading.block("", "", tree, _Check.ALL)
        reading.old_spellings()
        reading.contradictions()
        if check_paths is not None:
            reading.directories(check_paths)
        reading.batch(world_size)
    if reading.problems:
        raise ConfigError(reading.problems)
    result: dict[str, Any] = {"notices": source.notices if isinstance(source, Config) else tuple(reading.notices)}
    for key in KEYS:
        if _is_field(key) or (isinstance(key.takes, Block) and _has_built(key.path)):
            parent = result
            for name in key.block.split(".") if key.block else ():
                parent = parent[name]
            parent[key.name] = {} if isinstance(key.takes, Block) else reading.value(key.path)
    return Config.model_validate(result)


def _has_built(block: str) -> bool:
    return any(_is_field(key) and key.path.startswith(block + ".") for key in KEYS)


def _is_field(key: Key) -> bool:
    """Whether the result has a value for this key."""
    return key.verdict is BUILT and not key.becomes and not isinstance(key.takes, Block)


class _Twice(dict[str, object]):
    """A JSON object in which some names were given more than once."""

    twice: tuple[str, ...] = ()


def _pairs(pairs: list[tuple[str, object]]) -> dict[str, object]:
    names = dict(pairs)
    if len(names) == len(pairs):
        return names
    seen: set[str] = set()
    twice: dict[str, None] = {}
    for name, _ in pairs:
        if name in seen:
            twice[name] = None
        seen.add(name)
    result = _Twice(names)
    result.twice = tuple(twice)
    return result


def _given_twice(tree: dict[str, object]) -> Iterator[str]:
    """The paths of all names that were given more than once in one JSON object."""
    left: list[tuple[str, object]] = [("", tree)]
    while left:
        path, value = left.pop()
        if isinstance(value, dict):
            if isinstance(value, _Twice):
                yield from (_join(path, name) for name in value.twice)
            left.extend((_join(path, name), item) for name, item in value.items())
        elif isinstance(value, list):
            left.extend((f"{path}[{index}]", item) for index, item in enumerate(value))


def _tree(source: Mapping[str, Any] | str | os.PathLike[str], reading: _Reading) -> Mapping[str, object] | None:
    if isinstance(source, Mapping):
        return source
    if not isinstance(source, (str, os.PathLike)):
        reading.problem("", f"a config is a dict, a path or a JSON text, not {type(source).__name__}.")
        return None
    text = source if isinstance(source, str) and source.lstrip().startswith("{") else None
    where = "the JSON text"
    if text is None:
        where = f"'{os.fsdecode(source)}'"
        try:
            with open(source, encoding="utf-8-sig") as file:
                text = file.read()
        except OSError as error:
            reading.problem("", f"{where} cannot be read: {error.strerror or error}. Give the path of a JSON file.")
            return None
        except ValueError as error:
            reading.problem("", f"{where} cannot be read: {error}. Give the path of a JSON file in UTF-8.")
            return None
    try:
        tree = json.loads(text, object_pairs_hook=_pairs)
    except json.JSONDecodeError as error:
        reading.problem("", f"{where} is not JSON: {error.msg} at line {error.lineno}, column {error.colno}.")
    except (ValueError, RecursionError) as error:
        reading.problem("", f"{where} is not JSON that can be read: {error}.")
    else:
        if isinstance(tree, dict):
            for path in _given_twice(tree):
                reading.problem(path, "given more than once. Keep one.")
            return tree
        reading.problem("", f"{where} holds {_show(tree)}, and a JSON object {{...}} is needed.")
    return None


class _Check(Enum):
    """How a block is read: in full, or (where it is not built) only for names and types."""

    ALL = "all"
    NAMES = "names and types"


_OFFLOAD_BLOCKS = ("zero_optimization.offload_param", "zero_optimization.offload_optimizer")


class _Reading:
    """One pass over a config: what was given, what is wrong with it, and what is to be said."""

    def __init__(self) -> None:
        self.problems: list[ConfigProblem] = []
        self.notices: list[str] = []
        self._values: dict[str, object] = {}
        self._wrong: set[str] = set()

    def problem(self, path: str, message: str) -> None:
        self.problems.append(ConfigProblem(path, message))
        self._wrong.add(path)

    def value(self, path: str) -> Any:
        return self._values.get(path, _BY_PATH[path].default)

    def block(self, path: str, shown: str, tree: Mapping[str, object], check: _Check) -> None:
        """Reads the block at ``path``, which was given as ``shown`` (an alias, perhaps)."""
        given: dict[str, str] = {}
        for name, value in tree.items():
            if not isinstance(name, str):
                self.problem(_join(shown, _show(name)), "a key must be text.")
                continue
            key = _NAMES[path].get(name)
            if key is None:
                self.problem(_join(shown, name), _unknown(path, name))
            elif key.path in given:
                self.problem(_join(shown, name), f"the same key as '{given[key.path]}', which is given too. Keep '{key.name}'.")
            else:
                given[key.path] = name
                if name != key.name:
                    self.notices.append(f"{_join(shown, name)}: taken as {key.path}")
                self._key(key, _join(shown, name), value, check)

    def _key(self, key: Key, path: str, value: object, check: _Check) -> None:
        if isinstance(value, str) and value == "auto":
            return
        if value is None and (key.default is None or isinstance(key.takes, Block) or key.verdict is not BUILT):
            return
        if isinstance(key.takes, Block):
            self._sub_block(key, key.takes, path, value, check)
            return
        try:
            read = key.takes.read(value)
        except Refusal as refusal:
            reason = f"{_show(value)} was given: {refusal.reason}" if refusal.reason else ""
            hint = f" {refusal.hint}" if refusal.hint else ""
            self.problem(path, reason or f"{_show(value)} was given, but {key.takes.text} is needed.{hint}")
            self._wrong.add(key.path)
            return
        if key.verdict is BUILT:
            self._values[key.path] = read
        elif check is _Check.ALL and key.verdict is not PART:
            self._unbuilt(key, path, value, read)

    def _sub_block(self, key: Key, kind: Block, path: str, value: object, check: _Check) -> None:
        if not isinstance(value, Mapping):
            if not (value is False and key.verdict is not BUILT):
                some = next((name for name in _NAMES[key.path]), "")
                self.problem(path, f'{_show(value)} was given, but a block with keys of its own is needed, such as {{"{some}": ...}}.')
            return
        if kind.switch is None and key.verdict not in (BUILT, PART) and check is _Check.ALL:
            self._unbuilt(key, path, value, value)
            check = _Check.NAMES
        self.block(key.path, path, value, check)

    def _unbuilt(self, key: Key, path: str, value: object, read: object) -> None:
        silent = key.off if key.verdict is IGNORED or isinstance(key.takes, Block) else (*key.off, key.default)
        if any(_same(read, off) for off in silent) or (isinstance(key.takes, Anything) and _is_off(value)):
            return
        if key.verdict is IGNORED:
            self.notices.append(f"{path}: ignored: {key.text}")
            return
        way_out = "Remove it." if key.default is None or isinstance(key.takes, Block) else f"Remove it or write {_show(key.default)}."
        what = "not yet;" if key.verdict is LATER else "refused:"
        self.problem(path, f"{_show(value)} was given: {what} {key.text}. {way_out}")

    def old_spellings(self) -> None:
        """Gives the values of old spellings to the keys that they stand for."""
        for key in KEYS:
            if not key.becomes or key.path not in self._values:
                continue
            value = self._values.pop(key.path)
            against = []
            for target in key.becomes:
                new = value if target.endswith("pin_memory") else "cpu" if value else "none"
                if target in self._values and self._values[target] != new:
                    against.append(f"{target}: {_show(self._values[target])}")
                else:
                    self._values[target] = new
            if against:
                self.problem(key.path, f"{_show(value)} contradicts {' and '.join(against)}. Remove the old spelling.")
            self.notices.append(f"{key.path}: {key.text}")

    def directories(self, check_paths: Callable[[Sequence[str]], Sequence[str | None]]) -> None:
        """Has the directories that are to be used looked at, once."""
        seen: list[tuple[str, ...]] = []
        for block in _OFFLOAD_BLOCKS:
            key = f"{block}.nvme_path"
            paths = self.value(key)
            if self.value(f"{block}.device") != "nvme" or key in self._wrong or paths is None or paths in seen:
                continue
            seen.append(paths)
            for index, problem in enumerate(check_paths(paths)):
                if problem is not None:
                    self.problem(f"{key}[{index}]" if len(paths) > 1 else key, problem)

    def contradictions(self) -> None:
        given = {f"{block}.nvme_path": self.value(f"{block}.nvme_path") for block in _OFFLOAD_BLOCKS}
        used = [f"{block}.nvme_path" for block in _OFFLOAD_BLOCKS if self.value(f"{block}.device") == "nvme"]
        for key in used:
            if given[key] is not None or key in self._wrong:
                continue
            like = 'on the drive, such as "/local_nvme/run1"'
            for other, paths in given.items():
                if paths is not None:
                    like = f"such as {_show(paths if len(paths) > 1 else paths[0])}, which is {other}"
            self.problem(key, f'missing, and {key.removesuffix("nvme_path")}device is "nvme". Give a directory {like}.')
        usable = [given[key] for key in used if given[key] is not None]
        if len({tuple(map(os.path.normpath, paths)) for paths in usable}) > 1:
            self.problem(used[1], f"other directories than {used[0]}: not yet. Give both the same, in the same order.")
        weights = self.value("aio.path_weights")
        if weights != "auto" and usable and len(weights) != len(usable[0]):
            self.problem("aio.path_weights", f"{len(weights)} weights for {len(usable[0])} paths of nvme_path. Give one for each.")
        clipping = self.value("gradient_clipping")
        if self.value("optimizer_overlap") == "fused" and clipping > 0:
            self.problem(
                "optimizer_overlap",
                f'"fused" contradicts gradient_clipping: {_show(clipping)}, because the clip factor needs every gradient first. '
                'Use "auto" or "deferred", or write gradient_clipping: 0.',
            )

    def batch(self, world_size: int) -> None:
        """Any two of the batch triple give the third."""
        names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
        if self._wrong.intersection(names):
            return
        total, micro, steps = (self.value(name) for name in names)
        ranks = f" x {world_size} ranks" if world_size != 1 else ""
        if total is None and micro is None:
            self.problem(
                "train_micro_batch_size_per_gpu", "missing, and so is train_batch_size. Give at least one of the two: a whole number >= 1."
            )
            return
        if total is None:
            steps = steps or 1
            total = micro * steps * world_size
        elif micro is None:
            steps = steps or 1
            micro, rest = divmod(total, steps * world_size)
            if rest or not micro:
                self.problem("train_batch_size", f"{total} is not a multiple of {steps} gradient_accumulation_steps{ranks}.")
                return
        elif steps is None:
            steps, rest = divmod(total, micro * world_size)
            if rest or not steps:
                self.problem("train_batch_size", f"{total} is not a multiple of {micro} train_micro_batch_size_per_gpu{ranks}.")
                return
        elif total != micro * steps * world_size:
            self.problem(
                "train_batch_size",
                f"{total} was given, but {micro} train_micro_batch_size_per_gpu x {steps} gradient_accumulation_steps{ranks} is "
                f"{micro * steps * world_size}. Leave one of the three out.",
            )
            return
        self._values.update(zip(names, (total, micro, steps), strict=True))


def _unknown(block: str, name: str) -> str:
    siblings = _NAMES[block]
    folded = name.strip().lower().replace("-", "_")
    near = folded if folded in siblings else None
    homes = [home for home in _HOMES.get(folded, ()) if home != block]
    if near is None and 0 < len(homes) <= 3:
        return f"unknown key here. That key belongs {' or '.join(f'under {home!r}' if home else 'at the top level' for home in homes)}."
    near = near or _nearest(folded, siblings)
    if near:
        return f"unknown key. Did you mean '{near}'?"
    far = None if folded in _HOMES else _nearest(folded, _HOMES, cutoff=0.8)
    if far:
        return f"unknown key. Did you mean '{_join(_HOMES[far][0], far)}'?"
    here = [key for key in KEYS if key.block == block]
    allowed = [key.name for key in here if key.verdict is BUILT] or [key.name for key in here]
    return f"unknown key. Allowed here: {_quoted(allowed)}."


def _nearest(word: str, known: Mapping[str, object] | Sequence[str], cutoff: float = 0.6) -> str | None:
    near = difflib.get_close_matches(word, list(known), 1, cutoff)
    return near[0] if near else None


def _same(value: object, other: object) -> bool:
    if isinstance(value, bool) or isinstance(other, bool):
        return value is other
    return value == other


def _is_off(value: object) -> bool:
    """Whether a block or switch that is not built asks for nothing."""
    if value is None or value is False:
        return True
    return isinstance(value, Mapping) and (not value or value.get("enabled") is False)


def _join(block: str, name: str) -> str:
    return f"{block}.{name}" if block else name


def _quoted(words: Sequence[str]) -> str:
    return ", ".join(f"'{word}'" for word in words)


def _short(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."


def _show(value: object) -> str:
    """A value as JSON would write it, short."""
    if isinstance(value, Mapping):
        return "a block"
    if isinstance(value, (list, tuple)):
        long = len(value) > 4 or any(isinstance(item, (list, tuple, Mapping)) for item in value)
        return "a list" if long else f"[{', '.join(map(_show, value))}]"
    if isinstance(value, (bool, str, int, float)) or value is None:
        try:
            return _short(json.dumps(value))
        except ValueError:
            return "a number with thousands of digits"
    return f"an object of type {type(value).__name__}"


# ---- the reference ----------------------------------------------------------------------------------------------------------------


_HEAD = """# Config reference

Generated from the table in `infinity/config.py` by `python -m infinity.config`; a test keeps it up to date.

A config is a dict, the path of a JSON file, or a JSON text. Its shape is DeepSpeed's. Everything wrong with it is said at once,
before any memory is used. `"auto"` stands for the default wherever a key is; sizes are bytes, or texts such as `"8MiB"` (1,024s) and
`"2GB"` (1,000s). A key that is refused or not there yet may be given its default, which leaves it off.
"""


def config_reference() -> str:
    """``docs/config.md``: every key, what it takes, its default, and what becomes of it."""
    lines = [_HEAD]
    for block in _NAMES:
        rows = [key for key in KEYS if key.block == block and not isinstance(key.takes, Block)]
        if not rows:
            continue
        owner = _BY_PATH.get(block)
        lines.append(f"## `{block}`\n" if owner else "## Top level\n")
        if owner and owner.text:
            lines.append(f"{_sentence(owner)}{_also(owner)}\n")
        if all(key.verdict is PART for key in rows):
            lines.append(f"Known by name: {', '.join(f'`{key.name}`' for key in rows)}.\n")
            continue
        lines += ["| key | takes | default | |", "|---|---|---|---|"]
        for key in rows:
            if key.verdict is not PART:
                lines.append(f"| `{key.name}` | {key.takes.text} | {_default(key)} | {_sentence(key)}{_also(key)} |")
        parts = [key for key in rows if key.verdict is PART]
        lines.append(f"\nKnown by name: {', '.join(f'`{key.name}`' for key in parts)}.\n" if parts else "")
    return "\n".join(lines).rstrip("\n") + "\n"


def _sentence(key: Key) -> str:
    return key.text if key.verdict is BUILT else f"**{key.verdict.value}**: {key.text}"


def _also(key: Key) -> str:
    return f" (also {', '.join(f'`{name}`' for name in key.aliases)})" if key.aliases else ""


def _default(key: Key) -> str:
    if key.default is None:
        return "-"
    if key.default == sys.maxsize:
        return "no limit"
    return f"`{json.dumps(key.default)}`"


if __name__ == "__main__":
    sys.stdout.write(config_reference())
