"""Whatever is done to a config, it loads or there is one ConfigError that names the keys: never another exception."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity.config import KEYS, Block, Config, Key, Verdict, load_config
from infinity.errors import ConfigError

# Every block that is built, with values other than the defaults.
WHOLE: dict[str, Any] = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True, "auto_cast": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-9, "weight_decay": 0.1}},
    "zero_optimization": {
        "stage": 3,
        "offload_param": {"device": "nvme", "nvme_path": ["/nvme0", "/nvme1"], "pin_memory": False},
        "offload_optimizer": {"device": "nvme", "nvme_path": ("/nvme0", "/nvme1"), "pin_memory": False},
        "stage3_param_persistence_threshold": 10_000,
        "stage3_model_persistence_threshold": 1_000_000,
        "stage3_max_live_parameters": 10_000_000,
        "stage3_prefetch_bucket_size": 1_000_000,
        "leaf_module": {"classes": ["Block"], "names": ["head"]},
    },
    "memory": {"device": "1GiB", "host": 0.25},
    "optimizer_overlap": "deferred",
    "optimizer_threads": 2,
    "verify": "off",
    "page": "1MiB",
    "aio": {
        "block_size": "1M",
        "queue_depth": 16,
        "in_flight": "64MiB",
        "intra_op_parallelism": 2,
        "backend": "threads",
        "direct_io": "required",
        "path_weights": [2.0, 1.0],
        "stall_s": 60,
    },
}


def places(tree: dict[str, Any], block: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, value in tree.items():
        yield (*block, name)
        if isinstance(value, dict):
            yield from places(value, (*block, name))


PLACES = list(places(WHOLE))
BLOCKS = [(), *(place for place in PLACES if any(other[:-1] == place for other in PLACES))]
IDS = [".".join(place) for place in PLACES]


def block_at(tree: dict[str, Any], block: tuple[str, ...]) -> dict[str, Any]:
    for name in block:
        tree = tree[name]
    return tree


def outcome(source: Any) -> Config | ConfigError:
    """What loading gives; an error must name at least one problem, each with a text and each key once."""
    try:
        return load_config(source)
    except ConfigError as caught:
        error = caught
    keys = [problem.key for problem in error.problems]
    assert keys
    assert len(keys) == len(set(keys))
    assert all(problem.message and str(problem) in str(error) for problem in error.problems)
    return error


def keys_of(result: Config | ConfigError) -> set[str]:
    assert isinstance(result, ConfigError)
    return {problem.key for problem in result.problems}


words = st.sampled_from(["auto", "cpu", "nvme", "8MiB", "0.5", "AdamW"])
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12) | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


def test_the_whole_config_loads() -> None:
    assert isinstance(outcome(WHOLE), Config)


def test_the_whole_config_names_every_key_that_is_built() -> None:
    built = {key.path for key in KEYS if key.verdict is Verdict.BUILT and not key.becomes and not isinstance(key.takes, Block)}
    assert built <= set(IDS)


@pytest.mark.parametrize("place", PLACES, ids=IDS)
@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_a_misspelled_key_is_named(place: tuple[str, ...], data: st.DataObject) -> None:
    tree = copy.deepcopy(WHOLE)
    block = block_at(tree, place[:-1])
    name = place[-1]
    index = data.draw(st.integers(0, len(name) - 1))
    letter = data.draw(st.characters())
    before, after = name[:index], name[index + 1 :]
    wrong = data.draw(st.sampled_from([before + after, before + letter + name[index:], before + letter + after]))
    known = {other for key in KEYS if key.block == ".".join(place[:-1]) for other in (key.name, *key.aliases)}
    block[wrong] = block.pop(name)
    result = outcome(tree)
    if wrong not in known:
        assert ".".join((*place[:-1], wrong)) in keys_of(result)


@pytest.mark.parametrize("place", [place for place in PLACES if len(place[-1]) > 3], ids=".".join)
def test_a_key_that_lost_a_letter_is_met_with_its_right_name(place: tuple[str, ...]) -> None:
    tree = copy.deepcopy(WHOLE)
    block = block_at(tree, place[:-1])
    wrong = place[-1][:-2] + place[-1][-1]
    block[wrong] = block.pop(place[-1])
    result = outcome(tree)
    assert isinstance(result, ConfigError)
    messages = {problem.key: problem.message for problem in result.problems}
    assert f"'{place[-1]}'" in messages[".".join((*place[:-1], wrong))]


@pytest.mark.parametrize("place", PLACES, ids=IDS)
def test_a_key_moved_to_any_other_block_is_named_or_valid_there(place: tuple[str, ...]) -> None:
    for target in BLOCKS:
        if target == place[:-1] or target[: len(place)] == place:
            continue
        tree = copy.deepcopy(WHOLE)
        value = block_at(tree, place[:-1]).pop(place[-1])
        block_at(tree, target)[place[-1]] = value
        result = outcome(tree)
        if not any(place[-1] in (key.name, *key.aliases) for key in KEYS if key.block == ".".join(target)):
            assert ".".join((*target, place[-1])) in keys_of(result)


@pytest.mark.parametrize("place", PLACES, ids=IDS)
def test_a_dropped_key_gives_its_default_or_is_asked_for(place: tuple[str, ...]) -> None:
    tree = copy.deepcopy(WHOLE)
    del block_at(tree, place[:-1])[place[-1]]
    result = outcome(tree)
    assert isinstance(result, Config) or keys_of(result) == {".".join(place)}
    assert isinstance(result, ConfigError) is (place[-1] == "nvme_path")


@pytest.mark.parametrize("place", PLACES, ids=IDS)
@given(value=json_values)
@settings(max_examples=25, deadline=None)
def test_a_key_of_another_type_is_named_or_valid(place: tuple[str, ...], value: Any) -> None:
    tree = copy.deepcopy(WHOLE)
    block_at(tree, place[:-1])[place[-1]] = value
    result = outcome(tree)
    if isinstance(result, ConfigError):
        path, block = ".".join(place), ".".join(place[:-1])
        related = {"train_batch_size", "optimizer_overlap", "zero_optimization.offload_optimizer.nvme_path", "aio.path_weights"}
        assert all(key.startswith((path, block)) for key in keys_of(result) - related)


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.path)
@given(value=json_values)
@settings(max_examples=15, deadline=None)
def test_any_value_of_any_key_loads_or_is_a_config_error(key: Key, value: Any) -> None:
    tree: dict[str, Any] = copy.deepcopy(WHOLE)
    place = tree
    for name in key.block.split(".") if key.block else ():
        place = place.setdefault(name, {})
    place[key.name] = value
    outcome(tree)


@given(tree=st.dictionaries(st.sampled_from(sorted({key.name for key in KEYS})) | st.text(max_size=8), json_values, max_size=8))
@settings(max_examples=150, deadline=None)
def test_any_dict_loads_or_is_a_config_error(tree: dict[str, Any]) -> None:
    outcome(tree)


@given(text=st.text(max_size=40))
@settings(max_examples=100, deadline=None)
def test_any_text_in_braces_is_a_config_error(text: str) -> None:
    assert isinstance(outcome("{" + text + "}"), ConfigError)


@given(
    total=st.none() | st.integers(1, 64),
    micro=st.none() | st.integers(1, 64),
    steps=st.none() | st.integers(1, 64),
    ranks=st.integers(1, 8),
)
@settings(max_examples=200, deadline=None)
def test_a_resolved_batch_is_a_product_and_keeps_what_was_given(
    total: int | None, micro: int | None, steps: int | None, ranks: int
) -> None:
    source = {"train_batch_size": total, "train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": steps}
    try:
        config = load_config(source, world_size=ranks)
    except ConfigError:
        assert (total is None and micro is None) or (total is not None and total != (micro or 1) * (steps or 1) * ranks)
        return
    resolved = {name: getattr(config, name) for name in source}
    assert resolved == {name: value if value is not None else resolved[name] for name, value in source.items()}
    assert config.train_batch_size == config.train_micro_batch_size_per_gpu * config.gradient_accumulation_steps * ranks


@given(
    host=st.integers(4096, 2**60) | st.floats(0, 1, exclude_min=True),
    lr=st.floats(0, 1e6),
    beta=st.floats(0, 1, exclude_max=True),
    depth=st.integers(1, 4096),
    names=st.lists(st.text(min_size=1, max_size=8), max_size=3),
)
@settings(max_examples=100, deadline=None)
def test_a_valid_config_survives_json(host: float, lr: float, beta: float, depth: int, names: list[str]) -> None:
    tree = copy.deepcopy(WHOLE)
    tree["memory"]["host"] = host
    tree["optimizer"]["params"].update(lr=lr, betas=[beta, beta])
    tree["aio"]["queue_depth"] = depth
    tree["zero_optimization"]["leaf_module"]["names"] = names
    config = load_config(tree)
    assert math.isfinite(config.optimizer.params.lr)
    assert load_config(json.dumps(config.as_dict())) == config
