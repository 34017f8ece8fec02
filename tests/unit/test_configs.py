"""The files in configs/: complete, and each says nothing that is not used."""

from __future__ import annotations

from pathlib import Path

import pytest

from infinity.config import load_config

CONFIGS = Path(__file__).parents[2] / "configs"
FILES = sorted(path.name for path in CONFIGS.glob("*.json"))


def test_the_four_files_of_the_main_job_are_there() -> None:
    assert {"nvme.json", "cpu.json", "resident.json", "nvme-tight.json"} <= set(FILES)


@pytest.mark.parametrize("name", FILES)
def test_a_file_loads_without_a_notice(name: str) -> None:
    assert load_config(CONFIGS / name).notices == ()


@pytest.mark.parametrize("name", FILES)
def test_a_file_states_its_budgets_in_bytes(name: str) -> None:
    memory = load_config(CONFIGS / name).memory
    assert isinstance(memory.host, int)
    assert isinstance(memory.device, int)


@pytest.mark.parametrize(
    ("name", "param", "optimizer"),
    [("nvme.json", "nvme", "nvme"), ("cpu.json", "cpu", "cpu"), ("resident.json", "none", "none"), ("nvme-tight.json", "nvme", "nvme")],
)
def test_a_file_places_state_as_its_name_says(name: str, param: str, optimizer: str) -> None:
    zero = load_config(CONFIGS / name).zero_optimization
    assert (zero.offload_param.device, zero.offload_optimizer.device) == (param, optimizer)


def test_all_files_train_alike() -> None:
    configs = [load_config(CONFIGS / name) for name in ("nvme.json", "cpu.json", "resident.json", "nvme-tight.json")]
    assert len({(config.train_batch_size, config.optimizer.model_dump_json(), config.bf16.enabled) for config in configs}) == 1


def test_the_tight_file_has_the_smallest_host_budget() -> None:
    hosts = {name: load_config(CONFIGS / name).memory.host for name in FILES}
    assert min(hosts, key=lambda name: hosts[name]) == "nvme-tight.json"
