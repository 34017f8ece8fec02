"""The config: what it accepts, what it says of what it does not, and that its table of keys is whole."""

from __future__ import annotations

import base64
import json
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from infinity import config as module
from infinity.config import KEYS, Block, Config, Key, Verdict, budget_bytes, config_reference, load_config
from infinity.errors import ConfigError

BATCH = {"train_micro_batch_size_per_gpu": 2}
HUGE = pytest.param(10**5000, id="huge")
OFFLOAD = "zero_optimization.offload_optimizer"

# Every key of DeepSpeed 0.19, block by block: a key that loses its row makes a working config fail as "unknown".
DEEPSPEED = {
    "": """
        train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps managed_gradient_accumulation
        gradient_clipping prescale_gradients gradient_predivide_factor gradient_allreduce_op sparse_gradients
        communication_data_type seq_parallel_communication_data_type disable_allgather dataloader_drop_last bf16 bfloat16 fp16
        amp torch_autocast data_types optimizer scheduler zero_allow_untested_optimizer zero_force_ds_cpu_optimizer
        zero_optimization aio activation_checkpointing checkpoint nebula datastates_ckpt steps_per_print wall_clock_breakdown
        memory_breakdown dump_state log_level timers comms_logger flops_profiler tensorboard wandb csv_monitor comet compile
        tensor_parallel expert_parallel sequence_parallel_size data_parallel_size use_data_before_expert_parallelism pipeline
        hybrid_engine sparse_attention progressive_layer_drop eigenvalue quantize_training compression_training
        weight_quantization curriculum_learning data_efficiency elasticity autotuning graph_harvesting vocabulary_size
        allgather_size
    """,
    "zero_optimization": """
        stage contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce allgather_partitions
        allgather_bucket_size overlap_comm load_from_fp32_weights elastic_checkpoint offload_param offload_optimizer zenflow
        sub_group_size cpu_offload_param cpu_offload cpu_offload_use_pin_memory stage3_prefetch_bucket_size
        prefetch_bucket_size stage3_param_persistence_threshold param_persistence_threshold stage3_model_persistence_threshold
        model_persistence_threshold stage3_max_live_parameters max_live_parameters stage3_max_reuse_distance
        max_reuse_distance stage3_gather_16bit_weights_on_model_save gather_16bit_weights_on_model_save
        stage3_gather_fp16_weights_on_model_save stage3_module_granularity_threshold module_granularity_threshold
        stage3_use_all_reduce_for_fetch_params use_all_reduce_for_fetch_params stage3_allgather_sequential
        allgather_sequential ignore_unused_parameters legacy_stage1 round_robin_gradients zero_hpz_partition_size
        zero_quantized_weights zero_quantized_nontrainable_weights zero_quantized_gradients zeropp_loco_param mics_shard_size
        mics_hierarchical_params_gather memory_efficient_linear pipeline_loading_checkpoint override_module_apply
        log_trace_cache_warnings enable_sanity_checks save_muon_momentum_buffer_in_memory leaf_module
    """,
    "zero_optimization.leaf_module": "classes names name_suffixes",
    "zero_optimization.offload_param": "device nvme_path buffer_count buffer_size max_in_cpu pin_memory",
    "zero_optimization.offload_optimizer": """
        device nvme_path buffer_count pin_memory pipeline_read pipeline_write fast_init ratio super_offload cpuadam_cores_perc
    """,
    "zero_optimization.zenflow": """
        topk_ratio select_strategy select_interval update_interval overlap_step offload auto_ratio full_warm_up_rounds
        pt_reserved_cores_perc steps_per_epoch
    """,
    "aio": "block_size queue_depth intra_op_parallelism single_submit overlap_events use_gds thread_count num_threads",
    "activation_checkpointing": """
        partition_activations cpu_checkpointing contiguous_memory_optimization number_checkpoints
        synchronize_checkpoint_boundary profile
    """,
    "bf16": "enabled immediate_grad_update check_grad_overflow bf16_master_weights_and_grads bf16_optimizer_states",
    "fp16": """
        enabled auto_cast loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis min_loss_scale
        fp16_master_weights_and_grads
    """,
    "torch_autocast": "enabled dtype lower_precision_safe_modules",
    "data_types": "grad_accum_dtype param_dtype buffer_dtype",
    "optimizer": "type params legacy_fusion",
    "optimizer.params": """
        lr betas eps weight_decay adam_w_mode torch_adam fp32_optimizer_states bias_correction amsgrad max_grad_norm muon_lr
        adam_lr momentum ns_method
    """,
    "scheduler": "type params",
    "scheduler.params": """
        last_batch_iteration lr_range_test_min_lr lr_range_test_step_size lr_range_test_step_rate lr_range_test_staircase
        cycle_min_lr cycle_max_lr decay_lr_rate cycle_first_step_size cycle_second_step_size cycle_first_stair_count
        cycle_second_stair_count decay_step_size cycle_momentum cycle_min_mom cycle_max_mom decay_mom_rate warmup_min_lr
        warmup_max_lr warmup_num_steps warmup_type total_num_steps warmup_min_ratio cos_min_ratio
    """,
    "checkpoint": "tag_validation load_universal use_node_local_storage parallel_write checkpoint_serialization writer",
    "checkpoint.parallel_write": "pipeline_stage",
    "checkpoint.writer": "type decoupled io_buffer_size io_buffer_double show_statistics data_parallel io_multiplier",
    "timers": "throughput",
    "timers.throughput": "enabled synchronized",
    "comms_logger": "enabled verbose prof_all debug prof_ops",
    "flops_profiler": "enabled recompute_fwd_factor profile_step module_depth top_modules detailed output_file",
    "tensorboard": "enabled output_path job_name",
    "csv_monitor": "enabled output_path job_name",
    "wandb": "enabled group team project",
    "comet": "enabled samples_log_interval project workspace api_key experiment_name experiment_key online mode",
    "compile": """
        deepcompile free_activation free_activation_threshold offload_activation offload_activation_pin_memory
        offload_opt_states double_buffer symmetric_memory debug_log offload_parameters sync_before_reduce sync_after_reduce
        sync_before_allgather sync_after_allgather keep_int_input_tensors keep_all_input_tensors passes
    """,
}


def at(path: str, value: object) -> dict[str, Any]:
    """The smallest valid config with ``value`` at ``path``."""
    tree: dict[str, Any] = dict(BATCH)
    place = tree
    *blocks, name = path.split(".")
    for block in blocks:
        place = place.setdefault(block, {})
    place[name] = value
    return tree


def load(path: str, value: object) -> Config:
    return load_config(at(path, value))


def refused(source: Any, **options: Any) -> dict[str, str]:
    """The problems of a config that must be refused: message by key path."""
    with pytest.raises(ConfigError) as caught:
        load_config(source, **options)
    assert len({problem.key for problem in caught.value.problems}) == len(caught.value.problems)
    return {problem.key: problem.message for problem in caught.value.problems}


# ---- sources


def test_a_dict_a_path_and_a_json_text_give_the_same_config(tmp_path: Path) -> None:
    text = json.dumps(at("memory.host", "1GiB"))
    (tmp_path / "a.json").write_text(text)
    expected = load_config(at("memory.host", "1GiB"))
    assert load_config(text) == load_config(tmp_path / "a.json") == load_config(str(tmp_path / "a.json")) == expected


def test_a_file_may_start_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b"\xef\xbb\xbf" + json.dumps(BATCH).encode())
    assert load_config(tmp_path / "a.json") == load_config(BATCH)


def test_a_config_that_is_already_loaded_is_taken_as_it_is() -> None:
    config = load("steps_per_print", 10)
    assert load_config(config) == config
    assert load_config(config).notices == config.notices != ()


def test_a_resolved_config_loads_again_to_the_same() -> None:
    config = load_config({**BATCH, "memory": {"host": 0.25, "device": "2GB"}, "zero_optimization": {"leaf_module": {"names": ["a"]}}})
    assert load_config(json.dumps(config.as_dict())) == config


def test_the_source_is_left_as_it_was() -> None:
    source = at(f"{OFFLOAD}.device", "cpu")
    load_config(source)
    assert source == at(f"{OFFLOAD}.device", "cpu")


@pytest.mark.parametrize("source", [None, 3, b"{}", [BATCH]])
def test_a_source_of_another_type_is_refused(source: object) -> None:
    assert "dict, a path or a JSON text" in refused(source)[""]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert "no-such.json" in refused(tmp_path / "no-such.json")[""]


def test_a_directory_is_not_a_config(tmp_path: Path) -> None:
    assert "cannot be read" in refused(tmp_path)[""]


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b"\xff\xfe\x00")
    assert "UTF-8" in refused(tmp_path / "a.json")[""]


@pytest.mark.parametrize(
    "source", ["", "\0", "x" * 5000, "\ud800", base64.b64encode(b"{}").decode()], ids=["empty", "nul", "long", "half", "base64"]
)
def test_a_text_that_is_neither_json_nor_a_path_is_refused(source: str) -> None:
    assert "cannot be read" in refused(source)[""]


def test_broken_json_is_refused_with_line_and_column() -> None:
    assert "line 2, column 1" in refused('{"train_batch_size": 1,\n}')[""]


@pytest.mark.parametrize("text", ['{"a":' * 100_000, '{"a": ' + "9" * 5000 + "}"], ids=["deep", "huge"])
def test_json_that_python_cannot_take_is_refused(text: str) -> None:
    assert set(refused(text)) & {"", "a"}


@pytest.mark.parametrize("text", ["[]", "3", "null"])
def test_a_file_without_a_json_object_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_text(text)
    assert "object" in refused(tmp_path / "a.json")[""]


def test_a_json_key_given_twice_is_refused_at_any_depth() -> None:
    text = '{"train_batch_size": 1, "aio": {"queue_depth": 1, "queue_depth": 1}, "elasticity": {"enabled": false, "x": [{"y": 1, "y": 2}]}}'
    assert set(refused(text)) == {"aio.queue_depth", "elasticity.x[0].y"}


# ---- types


def test_every_value_is_there_and_has_one_type() -> None:
    config = load_config({**BATCH, "optimizer": {"params": {"lr": 1, "betas": [0, 0.5]}}, "memory": {"host": "1MiB"}})
    assert (config.optimizer.params.lr, config.optimizer.params.betas, config.memory.host) == (1.0, (0.0, 0.5), 1 << 20)
    assert isinstance(config.optimizer.params.lr, float)


def test_defaults_are_these() -> None:
    assert load_config(BATCH).as_dict() == {
        "train_batch_size": 2,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": False, "auto_cast": False},
        "optimizer": {"type": "adamw", "params": {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "none", "nvme_path": None, "pin_memory": True},
            "offload_optimizer": {"device": "none", "nvme_path": None, "pin_memory": True},
            "stage3_param_persistence_threshold": 100_000,
            "stage3_model_persistence_threshold": sys.maxsize,
            "stage3_max_live_parameters": 1_000_000_000,
            "stage3_prefetch_bucket_size": 50_000_000,
            "leaf_module": {"classes": [], "names": []},
        },
        "memory": {"device": "auto", "host": "auto"},
        "aio": {
            "block_size": 1 << 20,
            "queue_depth": 32,
            "in_flight": 256 << 20,
            "intra_op_parallelism": 4,
            "backend": "auto",
            "direct_io": "auto",
            "path_weights": "auto",
            "stall_s": 600.0,
        },
        "optimizer_overlap": "auto",
        "optimizer_threads": "auto",
        "verify": "write+read",
        "page": "auto",
    }


def test_a_config_cannot_be_changed() -> None:
    config = load_config(BATCH)
    for block, name in ((config, "page"), (config.memory, "host"), (config.zero_optimization.offload_param, "device")):
        with pytest.raises(ValidationError, match="frozen"):
            setattr(block, name, "auto")


@pytest.mark.parametrize(
    "path", ["gradient_accumulation_steps", "gradient_clipping", "aio.queue_depth", "memory.host", "optimizer.params.lr", "page"]
)
def test_a_bool_is_not_a_number(path: str) -> None:
    assert "true was given" in refused(at(path, True))[path]


def test_a_number_is_not_a_bool() -> None:
    assert "Write true." in refused(at("bf16.enabled", 1))["bf16.enabled"]


def test_a_whole_float_is_a_whole_number() -> None:
    assert load("zero_optimization.stage3_max_live_parameters", 5e8).zero_optimization.stage3_max_live_parameters == 500_000_000


@pytest.mark.parametrize("value", [0, -1, 1.5, "8", "eight", [8], {}, math.nan, math.inf, 2**63, HUGE])
def test_what_is_not_a_positive_whole_number_is_refused(value: object) -> None:
    assert "a whole number >= 1 is needed" in refused(at("train_batch_size", value))["train_batch_size"]


@pytest.mark.parametrize("value", [-1, "0.1", "fast", [], math.nan, -math.inf, math.inf, HUGE])
def test_what_is_not_a_finite_number_is_refused(value: object) -> None:
    assert "a number >= 0 is needed" in refused(at("optimizer.params.lr", value))["optimizer.params.lr"]


def test_a_number_in_quotes_is_told_to_lose_them() -> None:
    assert refused(at("train_batch_size", "8"))["train_batch_size"].endswith("Write 8 without quotes.")


@pytest.mark.parametrize("value", [[0.9], [0.9, 1], [0.9, -0.1], [0.9, "0.95"], [0.9, 0.95, 0.99], 0.9, "0.9"])
def test_betas_are_two_numbers_from_0_to_below_1(value: object) -> None:
    assert "a list of 2, each a number >= 0 and < 1" in refused(at("optimizer.params.betas", value))["optimizer.params.betas"]


@pytest.mark.parametrize(("value", "nbytes"), [("160MiB", 160 << 20), ("2GB", 2 * 10**9), (1 << 30, 1 << 30), (2e9, 2 * 10**9)])
def test_a_budget_is_taken_in_bytes(value: object, nbytes: int) -> None:
    host = load("memory.host", value).memory.host
    assert (host, type(host)) == (nbytes, int)


@pytest.mark.parametrize("value", [0.5, 1.0])
def test_a_budget_is_taken_as_a_fraction(value: float) -> None:
    host = load("memory.host", value).memory.host
    assert (host, type(host)) == (value, float)


@pytest.mark.parametrize("value", [0, 0.0, -0.5, 1.5, 1, "0.5", "half", "", "-1GB", True, math.nan, math.inf, [], "9" * 20 + "PiB"])
def test_what_is_neither_bytes_nor_a_fraction_is_refused(value: object) -> None:
    assert set(refused(at("memory.host", value))) == {"memory.host"}


def test_a_budget_is_resolved_against_what_is_free_and_what_is_useful() -> None:
    assert budget_bytes(1000, free_bytes=10, useful_bytes=10) == 1000
    assert budget_bytes(0.25, free_bytes=1000, useful_bytes=10) == 250
    assert budget_bytes("auto", free_bytes=1000, useful_bytes=10) == 10
    assert budget_bytes("auto", free_bytes=1000, useful_bytes=900) == 500


@pytest.mark.parametrize("value", ["4KiB", 8 << 20, "1M"])
def test_a_page_is_a_power_of_two(value: object) -> None:
    assert isinstance(load("page", value).page, int)


@pytest.mark.parametrize("value", ["3MiB", "2KiB", "16MiB", 0, "1MB"])
def test_another_page_is_refused(value: object) -> None:
    assert "a power of two" in refused(at("page", value))["page"]


def test_a_block_size_may_be_text() -> None:
    assert load("aio.block_size", "1M").aio.block_size == 1 << 20


@pytest.mark.parametrize("value", [True, 3, "on", [1]])
def test_a_value_where_a_block_is_needed_is_refused(value: object) -> None:
    assert 'a block with keys of its own is needed, such as {"enabled": ...}' in refused(at("bf16", value))["bf16"]


@pytest.mark.parametrize("path", ["bf16", "optimizer", "zero_optimization", "zero_optimization.offload_param", "aio", "memory"])
def test_null_in_place_of_a_block_is_the_default(path: str) -> None:
    assert load(path, None) == load_config(BATCH)


def test_the_type_of_the_optimizer_may_be_written_in_any_case() -> None:
    assert load("optimizer.type", "AdamW").optimizer.type == "adamw"


# ---- keys


def test_a_misspelled_key_names_the_nearest_one() -> None:
    assert "Did you mean 'offload_param'?" in refused(at("zero_optimization.offload_parm", {}))["zero_optimization.offload_parm"]


def test_a_key_in_another_case_names_the_right_one() -> None:
    assert "Did you mean 'zero_optimization'?" in refused({**BATCH, "Zero-Optimization": {}})["Zero-Optimization"]


@pytest.mark.parametrize(
    ("path", "home"),
    [
        ("queue_depth", "'aio'"),
        ("offload_param", "'zero_optimization'"),
        ("zero_optimization.nvme_path", "'zero_optimization.offload_param' or under 'zero_optimization.offload_optimizer'"),
        ("zero_optimization.gradient_clipping", "at the top level"),
        ("zero_optimization.aio", "at the top level"),
        ("optimizer.lr", "'optimizer.params'"),
        (f"{OFFLOAD}.max_in_cpu", "'zero_optimization.offload_param'"),
    ],
)
def test_a_misplaced_key_names_where_it_belongs(path: str, home: str) -> None:
    message = refused(at(path, 1))[path]
    assert "That key belongs" in message
    assert home in message


def test_a_misspelled_key_in_the_wrong_place_names_the_whole_path() -> None:
    assert "Did you mean 'aio.queue_depth'?" in refused(at("optimizer.queue_dept", 1))["optimizer.queue_dept"]


def test_a_key_like_no_other_lists_what_is_allowed() -> None:
    assert "Allowed here: 'device', 'host'." in refused(at("memory.xyz", 1))["memory.xyz"]


@pytest.mark.parametrize("name", [1, None, (1, 2)])
def test_a_key_that_is_not_text_is_refused(name: object) -> None:
    assert "a key must be text." in refused({**BATCH, name: 1}).values()


ON_WHEN_THERE = {key.path for key in KEYS if isinstance(key.takes, Block) and not key.takes.switch and key.verdict is not Verdict.BUILT}


@pytest.mark.parametrize("path", [key.path for key in KEYS if key.block not in ON_WHEN_THERE])
def test_auto_is_the_default_for_every_key(path: str) -> None:
    if path.startswith("train_micro"):
        assert load_config({"train_batch_size": 2, path: "auto"}) == load_config(BATCH)
    else:
        assert load(path, "auto") == load_config(BATCH)


@pytest.mark.parametrize(
    ("alias", "path", "value"),
    [
        ("zero_optimization.prefetch_bucket_size", "zero_optimization.stage3_prefetch_bucket_size", 7),
        ("aio.thread_count", "aio.intra_op_parallelism", 2),
        ("bfloat16.enabled", "bf16.enabled", True),
        ("zero_optimization.cpu_offload", f"{OFFLOAD}.device", "cpu"),
    ],
)
def test_an_old_or_short_spelling_is_taken_and_says_so(alias: str, path: str, value: object) -> None:
    config = load(alias, True if alias.endswith("cpu_offload") else value)
    assert config.as_dict() == load(path, value).as_dict()
    assert len(config.notices) == 1


def test_a_key_given_under_two_names_is_refused() -> None:
    source = {**BATCH, "aio": {"num_threads": 1, "intra_op_parallelism": 1}}
    assert "Keep 'intra_op_parallelism'." in refused(source)["aio.intra_op_parallelism"]


def test_a_problem_inside_an_alias_is_named_as_it_was_written() -> None:
    assert set(refused(at("bfloat16.enable", True))) == {"bfloat16.enable"}


def test_an_old_spelling_that_contradicts_the_new_one_is_refused() -> None:
    source = {**BATCH, "zero_optimization": {"cpu_offload": True, "offload_optimizer": {"device": "none"}}}
    assert f"{OFFLOAD}.device" in refused(source)["zero_optimization.cpu_offload"]


def test_a_key_that_is_accepted_and_ignored_gives_one_line() -> None:
    assert load("zero_optimization.sub_group_size", 1000).notices == (
        "zero_optimization.sub_group_size: ignored: tiles follow from the page size; a tensor may span many",
    )


def test_a_key_that_is_ignored_is_still_checked() -> None:
    assert "a whole number" in refused(at("zero_optimization.sub_group_size", "big"))["zero_optimization.sub_group_size"]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("fp16.enabled", True),
        ("zero_optimization.stage", 0),
        ("zero_optimization.stage", 2),
        ("scheduler.type", "WarmupLR"),
        ("optimizer_overlap", "speculative"),
        ("aio.use_gds", True),
        ("optimizer.type", "Lion"),
        ("bf16.check_grad_overflow", True),
        ("check_grad_overflow", True),
        ("zero_optimization.offload_param.max_in_cpu", 5),
        ("data_types.grad_accum_dtype", "bf16"),
        ("tensorboard.enabled", True),
    ],
)
def test_what_comes_later_is_refused_as_not_yet(path: str, value: object) -> None:
    assert "not yet" in refused(at(path, value))[path]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("zero_optimization.zenflow", {"topk_ratio": 0.1}),
        ("zero_optimization.zenflow", {}),
        ("zero_optimization.zero_quantized_weights", True),
        ("optimizer.type", "OneBitAdam"),
        ("optimizer.params.adam_w_mode", False),
        ("optimizer.params.max_grad_norm", 1.0),
        ("amp", {"enabled": True}),
        ("compile.deepcompile", True),
        ("tensor_parallel", {"autotp_size": 2}),
        ("sequence_parallel_size", 2),
        ("elasticity", {"enabled": True}),
    ],
)
def test_what_is_not_offered_is_refused_with_the_reason(path: str, value: object) -> None:
    assert "refused: " in refused(at(path, value))[path]


UNBUILT = [key for key in KEYS if key.verdict in (Verdict.LATER, Verdict.REFUSED) and not isinstance(key.takes, Block)]


@pytest.mark.parametrize("key", UNBUILT, ids=lambda key: key.path)
def test_a_key_that_is_not_built_may_have_its_default(key: Key) -> None:
    assert load(key.path, key.default) == load_config(BATCH)


@pytest.mark.parametrize("key", UNBUILT, ids=lambda key: key.path)
def test_a_key_that_is_not_built_may_be_null(key: Key) -> None:
    assert load(key.path, None) == load_config(BATCH)


@pytest.mark.parametrize("key", [key for key in KEYS for off in key.off], ids=lambda key: key.path)
def test_a_key_may_be_switched_off_without_a_word(key: Key) -> None:
    for off in key.off:
        assert load(key.path, off) == load_config(BATCH)


@pytest.mark.parametrize(
    "block",
    [
        {"fp16": {"enabled": False, "loss_scale": 0, "loss_scale_window": 500, "initial_scale_power": "auto"}},
        {"flops_profiler": {"enabled": False, "profile_step": 1}},
        {"elasticity": {"enabled": False, "max_train_batch_size": 2000}},
        {"tensor_parallel": {}},
        {"amp": {"enabled": False, "opt_level": "O1"}},
        {"wandb": {"enabled": False, "team": "a"}},
    ],
)
def test_a_block_that_is_switched_off_may_hold_anything_it_knows(block: dict[str, Any]) -> None:
    assert load_config({**BATCH, **block}) == load_config(BATCH)


def test_a_block_that_is_not_built_gives_one_problem_and_its_misspelled_keys() -> None:
    assert set(refused({**BATCH, "fp16": {"enabled": True, "loss_scale": 0, "hysteresys": 2}})) == {"fp16.enabled", "fp16.hysteresys"}


# ---- contradictions


def test_a_config_of_hugging_face_loads() -> None:
    source = {
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "offload_param": {"device": "cpu", "pin_memory": True},
            "overlap_comm": True,
            "contiguous_gradients": True,
            "sub_group_size": 1e9,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
            "stage3_max_live_parameters": 1e9,
            "stage3_max_reuse_distance": 1e9,
            "stage3_gather_16bit_weights_on_model_save": "auto",
        },
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "steps_per_print": math.inf,
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 4,
        "wall_clock_breakdown": False,
    }
    config = load_config(source)
    assert (config.gradient_accumulation_steps, len(config.notices)) == (4, 5)


@pytest.mark.parametrize(
    ("given", "resolved"),
    [
        ((12, 2, 2), (12, 2, 2)),
        ((12, 2, None), (12, 2, 2)),
        ((12, None, 2), (12, 2, 2)),
        ((12, None, None), (12, 4, 1)),
        ((None, 2, 2), (12, 2, 2)),
        ((None, 2, None), (6, 2, 1)),
    ],
)
def test_two_of_the_batch_triple_give_the_third(given: tuple[int | None, ...], resolved: tuple[int, ...]) -> None:
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    config = load_config(dict(zip(names, given, strict=True)), world_size=3)
    assert tuple(getattr(config, name) for name in names) == resolved


@pytest.mark.parametrize("given", [(12, 2, 3), (13, 2, None), (13, None, 2), (13, None, None), (2, None, None), (2, 2, None)])
def test_a_batch_triple_that_does_not_divide_is_refused(given: tuple[int | None, ...]) -> None:
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    assert "3 ranks" in refused(dict(zip(names, given, strict=True)), world_size=3)["train_batch_size"]


@pytest.mark.parametrize("source", [{}, {"gradient_accumulation_steps": 4}])
def test_a_config_without_a_batch_size_is_refused(source: dict[str, Any]) -> None:
    assert "at least one of the two" in refused(source)["train_micro_batch_size_per_gpu"]


@pytest.mark.parametrize("block", ["offload_param", "offload_optimizer"])
def test_nvme_without_a_path_is_refused(block: str) -> None:
    assert "missing" in refused(at(f"zero_optimization.{block}.device", "nvme"))[f"zero_optimization.{block}.nvme_path"]


def test_a_missing_path_is_offered_the_one_of_the_other_block() -> None:
    zero = {"offload_param": {"device": "nvme", "nvme_path": "/x"}, "offload_optimizer": {"device": "nvme"}}
    source = {**BATCH, "zero_optimization": zero}
    assert '"/x"' in refused(source)[f"{OFFLOAD}.nvme_path"]


def test_two_different_paths_are_not_yet() -> None:
    block = {"device": "nvme", "nvme_path": "/x"}
    source = {**BATCH, "zero_optimization": {"offload_param": block, "offload_optimizer": {**block, "nvme_path": "/y"}}}
    assert "not yet" in refused(source)[f"{OFFLOAD}.nvme_path"]


def test_the_same_path_written_differently_is_the_same() -> None:
    block = {"device": "nvme", "nvme_path": "x/y"}
    source = {**BATCH, "zero_optimization": {"offload_param": block, "offload_optimizer": {**block, "nvme_path": "./x/y/"}}}
    assert load_config(source).nvme_paths == ("x/y",)


@pytest.mark.parametrize("value", ["/x y", ["/x y"], Path("/x y")])
def test_one_path_may_be_text_a_list_of_one_or_a_path(value: object) -> None:
    source = {**BATCH, "zero_optimization": {"offload_param": {"device": "nvme", "nvme_path": value}}}
    assert load_config(source).nvme_paths == ("/x y",)


@pytest.mark.parametrize("value", ["", "  ", [], [""], 3, {}, "a\0b"])
def test_what_is_not_a_path_is_refused(value: object) -> None:
    path = f"{OFFLOAD}.nvme_path"
    assert "the path of a directory" in refused(at(path, value))[path]


def test_a_path_may_start_at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    assert load(f"{OFFLOAD}.nvme_path", "~/nvme").zero_optimization.offload_optimizer.nvme_path == ("/home/someone/nvme",)


def test_a_path_that_nothing_uses_is_not_the_path() -> None:
    assert load(f"{OFFLOAD}.nvme_path", "/x").nvme_paths == ()


def on_nvme(paths: object, **changes: Any) -> dict[str, Any]:
    return {**BATCH, "zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": paths}}, **changes}


def test_several_paths_keep_their_order() -> None:
    config = load_config(on_nvme(["/b", Path("/a"), "c"]))
    assert config.nvme_paths == ("/b", "/a", "c")
    assert load_config(config.as_dict()) == config


def test_the_items_of_a_list_that_are_no_paths_are_named() -> None:
    assert "Not a path: [1], [2]." in refused(on_nvme(["/a", "", 3]))[f"{OFFLOAD}.nvme_path"]


def test_a_path_given_twice_is_refused_by_its_places() -> None:
    assert "[0] and [2] are the same" in refused(on_nvme(["/a/b", "/c", "/a/./b/"]))[f"{OFFLOAD}.nvme_path"]


def test_more_paths_than_there_can_be_are_refused() -> None:
    assert "At most 16." in refused(on_nvme([f"/{index}" for index in range(17)]))[f"{OFFLOAD}.nvme_path"]


def test_each_bad_directory_of_a_list_is_a_problem_of_its_own() -> None:
    def check(paths: Sequence[str]) -> list[str | None]:
        return [None if path == "/good" else f"{path} is bad" for path in paths]

    with pytest.raises(ConfigError) as caught:
        load_config(on_nvme(["/x", "/good", "/y"]), check_paths=check)
    key = f"{OFFLOAD}.nvme_path"
    assert {problem.key: problem.message for problem in caught.value.problems} == {f"{key}[0]": "/x is bad", f"{key}[2]": "/y is bad"}


def test_directories_that_both_blocks_use_are_looked_at_once() -> None:
    looked: list[Sequence[str]] = []

    def check(paths: Sequence[str]) -> list[str | None]:
        looked.append(paths)
        return [None for _ in paths]

    block = {"device": "nvme", "nvme_path": ["/a", "/b"]}
    load_config({**BATCH, "zero_optimization": {"offload_param": block, "offload_optimizer": block}}, check_paths=check)
    assert looked == [("/a", "/b")]


def test_weights_are_one_for_each_path() -> None:
    assert load_config(on_nvme(["/a", "/b"], aio={"path_weights": [3, 1.5]})).aio.path_weights == (3.0, 1.5)
    assert "3 weights for 2 paths" in refused(on_nvme(["/a", "/b"], aio={"path_weights": [1, 2, 3]}))["aio.path_weights"]


@pytest.mark.parametrize("weights", [[], [0, 1], [1, -1], ["1", 2], 3, {}, [math.inf, 1], [math.nan, 1]])
def test_what_are_no_weights_is_refused(weights: object) -> None:
    assert "numbers > 0" in refused(on_nvme(["/a", "/b"], aio={"path_weights": weights}))["aio.path_weights"]


def test_frames_are_page_locked_where_an_offloaded_block_asks_for_it() -> None:
    assert load(f"{OFFLOAD}.device", "cpu").pin_memory
    assert not load_config({**BATCH, "zero_optimization": {"offload_optimizer": {"device": "cpu", "pin_memory": False}}}).pin_memory
    assert not load_config(BATCH).pin_memory


def test_fused_with_clipping_is_refused() -> None:
    assert "gradient_clipping" in refused({**BATCH, "optimizer_overlap": "fused", "gradient_clipping": 1.0})["optimizer_overlap"]


def test_fused_with_accumulation_is_fine() -> None:
    assert load_config({**BATCH, "optimizer_overlap": "fused", "gradient_accumulation_steps": 4}).optimizer_overlap == "fused"


def test_all_problems_are_in_one_error() -> None:
    source = {
        "train_batch_size": "8",
        "gradient_clipping": -1,
        "zero_optimization": {"stage": 2, "offload_parm": {}, "offload_optimizer": {"device": "nvme"}},
        "aio": {"queue_depth": 0},
        "fp16": {"enabled": True},
    }
    assert set(refused(source)) == {
        "train_batch_size",
        "gradient_clipping",
        "zero_optimization.stage",
        "zero_optimization.offload_parm",
        f"{OFFLOAD}.nvme_path",
        "aio.queue_depth",
        "fp16.enabled",
    }


def test_the_same_is_refused_under_python_O() -> None:
    source = json.dumps({"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": 1}, "fp16": {"enabled": True}})
    script = (
        "from infinity.config import load_config\n"
        f"try: load_config({source!r})\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    root = Path(module.__file__).parents[1]
    outputs = []
    for flags in ([], ["-O"]):
        done = subprocess.run([sys.executable, *flags, "-c", script], capture_output=True, text=True, check=True, cwd=root)
        outputs.append(done.stdout)
    assert outputs[0] == outputs[1]
    assert outputs[0].startswith("ConfigError 3 problems")


# ---- the table


@pytest.mark.parametrize("block", DEEPSPEED)
def test_every_key_of_deepspeed_is_known(block: str) -> None:
    known = {name for key in KEYS if key.block == block for name in (key.name, *key.aliases)}
    assert set(DEEPSPEED[block].split()) - known == set()


def test_no_key_has_two_rows() -> None:
    names = [(key.block, name) for key in KEYS for name in (key.name, *key.aliases)]
    assert len(names) == len(set(names))


def test_every_block_that_is_named_has_a_row() -> None:
    assert {key.block for key in KEYS} - {""} <= {key.path for key in KEYS if isinstance(key.takes, Block)}


def test_a_block_comes_before_its_keys() -> None:
    paths = [key.path for key in KEYS]
    assert all(paths.index(key.block) < paths.index(key.path) for key in KEYS if key.block)


def test_every_row_says_something_unless_its_block_does() -> None:
    assert all(bool(key.text) is (key.verdict is not Verdict.PART) for key in KEYS)


def test_a_switch_is_a_key_of_its_block() -> None:
    paths = {key.path for key in KEYS}
    assert all(f"{key.path}.{key.takes.switch}" in paths for key in KEYS if isinstance(key.takes, Block) and key.takes.switch)


def test_an_old_spelling_stands_for_keys_that_are_built() -> None:
    built = {key.path for key in KEYS if key.verdict is Verdict.BUILT}
    assert all(set(key.becomes) <= built for key in KEYS)


def test_the_result_has_a_value_for_every_key_that_is_built_and_no_other() -> None:
    def leaves(model: type[BaseModel], block: str) -> set[str]:
        found: set[str] = set()
        for name, field in model.model_fields.items():
            inner = field.annotation
            path = f"{block}.{name}" if block else name
            found |= leaves(inner, path) if isinstance(inner, type) and issubclass(inner, BaseModel) else {path}
        return found

    built = {key.path for key in KEYS if key.verdict is Verdict.BUILT and not key.becomes and not isinstance(key.takes, Block)}
    assert leaves(Config, "") == built | {"notices"}


def test_the_reference_in_docs_is_up_to_date() -> None:
    path = Path(__file__).parents[2] / "docs" / "config.md"
    assert path.read_text(encoding="utf-8") == config_reference(), f"write it anew: python -m infinity.config > {path}"


def test_the_reference_names_every_key() -> None:
    reference = config_reference()
    assert [key.path for key in KEYS if f"`{key.name}`" not in reference and not isinstance(key.takes, Block)] == []


def test_every_row_of_the_reference_has_four_columns() -> None:
    rows = [line for line in config_reference().splitlines() if line.startswith("|")]
    assert {line.count("|") for line in rows} == {5}
